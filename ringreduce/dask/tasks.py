"""Ranks beside Dask's workers: a task on each lends a slot to a job, which is ringrun's."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringreduce.errors import InputError, MissingExtraError
from ringrun import lending

if TYPE_CHECKING:
    from distributed import Client

_LOOK_FOR_MORE_S = 1.0  # for workers that have come
_HERE = "ringreduce.dask.run()"
Wanted = str | int | Sequence[str | int] | None
_NAMES = {"np": "workers=", "num_proc": "workers=", "min_num_proc": "min_np=", "max_num_proc": "max_np="}


def run(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    client: Client | None = None,
    workers: Wanted = None,
    elastic: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    **flags: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on one rank for each worker of a Dask cluster; returns the results, by rank.

    client:    of the cluster, by default the current one.
    workers:   addresses or names of some of its workers, by default all. Those that are not there are refused, or with
               max_np used when they come.
    elastic:   ranks go on without those that fail, down to min_np; with max_np, workers that come later are used, too,
               from the next commit on. The results are those of the ranks that are left in the end.
    env:       variables for the ranks.
    timeout_s: how long workers may take to begin.
    flags:     ringrun's, as of `ringreduce.run`.

    Each rank is a process beside its worker, with that one's Python, folder, import path and GPU; one of the worker's
    threads waits for it. The loss of a worker is the loss of its rank, and of a host's first worker that of the host's.

    Raises: JobFailedError when a rank fails, with ringrun's report; StartupError when workers cannot run ranks;
            InputError; KeyboardInterrupt once all ranks have ended; MissingExtraError where Dask is not installed.

    >>> losses = run(train, args=(0.1,), client=client)                                                # doctest: +SKIP
    """
    client = client or current(_HERE)
    names = workers_of(client, workers, _HERE, others_may_come=bool(max_np))
    call = lending.call_of(_HERE, fn, args, kwargs)
    limits = {"min_np": min_np, "max_np": max_np}
    np, asked = lending.checked(_HERE, len(names), limits, elastic, flags, _NAMES)
    ticket = lending.ticket(timeout_s)
    look = (lambda: _there(client, workers, _HERE)[0]) if max_np else None
    lenders = _Lenders(client, ticket, names, look, asked.get("max_np", np), elastic)
    try:
        results: list[Any] = lending.run(call, ticket, min(np, lenders.most), asked, env or {}, lenders.trouble)
        return results
    finally:
        client.cancel(list(lenders.futures.values()))


def current(here: str) -> Client:
    """The current client, for the function that is `here`; raises MissingExtraError where Dask is not installed."""
    try:
        from distributed import get_client
    except ImportError as error:
        raise MissingExtraError.of("ringreduce.dask needs Dask", "distributed", error) from error
    try:
        found: Client = get_client()
        return found
    except ValueError as error:
        raise InputError(f"{here}: there is no Dask client here; pass client=Client(…)") from error


def workers_of(client: Client, wanted: Wanted, where: str, *, others_may_come: bool = False) -> list[str]:
    """Return the addresses of the workers that are wanted. InputError where there are none, or not all of these."""
    found, missing, names = _there(client, wanted, where)
    if missing:
        said = f"{where}: workers={wanted!r}: the cluster has none called {missing}; it has {names}"
        if not others_may_come:
            raise InputError(said)
        warnings.warn(f"{said}; those that come later are used", stacklevel=3)
    if not found:
        raise InputError(f"{where}: the cluster has no workers{'' if wanted is None else f' {wanted}'}")
    return found


def _there(client: Client, wanted: Wanted, where: str) -> tuple[list[str], list[Any], list[Any]]:
    """Return the addresses of those that are there, of the workers that are wanted; which are not, and all names."""
    if (there := client.scheduler_info(n_workers=-1).get("workers")) is None:
        raise InputError(f"{where}: this Dask client is closed; pass one that is connected to a cluster")
    asked = [wanted] if isinstance(wanted, str | int) else wanted
    found = [address for address, each in there.items() if asked is None or {address, each["name"]} & {*asked}]
    missing = {*(asked or ())} - {*there} - {each["name"] for each in there.values()}
    found.sort(key=lambda address: (there[address]["host"], address))
    return found, sorted(missing, key=str), sorted((each["name"] for each in there.values()), key=str)


def _lend(ticket: lending.Ticket) -> str:
    """Lend a slot; a task that has begun cannot be ended from elsewhere, so it looks whether it is cancelled."""
    from distributed import get_worker

    worker = get_worker()
    task = worker.state.tasks[worker.get_current_task()]
    said: str = lending.lend(ticket, wanted=lambda: task.state == "executing")
    return said


class _Lenders:
    """The tasks that lend slots, one on each worker."""

    def __init__(
        self,
        client: Client,
        ticket: lending.Ticket,
        names: Sequence[str],
        look: Callable[[], list[str]] | None,
        most: int,
        elastic: bool,
    ) -> None:
        """names: the workers that there are at first.

        look: returns those that there are, where those that come are to be used, up to `most`.
        """
        self._elastic = elastic
        self._client, self._ticket, self._names, self._look, self.most = client, ticket, names, look, most
        self.futures: dict[str, Any] = {}
        """By the address of the worker."""
        self._look_at_s = time.monotonic() + _LOOK_FOR_MORE_S

    def add(self, names: Sequence[str]) -> None:
        """Let these workers lend a slot each, as far as there may be so many."""
        for name in names:
            if name not in self.futures and len(self.futures) < self.most:
                only = {"workers": [name], "allow_other_workers": False, "pure": False, "retries": 0}
                key = f"ringreduce-{uuid.uuid4().hex}"
                self.futures[name] = self._client.submit(_lend, self._ticket, key=key, **only)

    def trouble(self) -> str:
        """Return why a worker cannot lend, of an elastic job why all cannot; see to those that have come and gone."""
        self.add(self._names)
        self._names = ()
        if self._look and time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + _LOOK_FOR_MORE_S
            there = self._look()
            self.futures = {name: each for name, each in self.futures.items() if name in there}
            self.add(there)
        failed = [each for each in self.futures.values() if each.status == "error"]
        may_go_on = self._elastic and len(failed) < len(self.futures)
        return str(failed[0].exception()) if failed and not may_go_on else ""
