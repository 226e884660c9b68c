"""ringreduce on Dask: ranks on the machines that Dask has.

    losses = ringreduce.dask.run(train, args=(0.1,), client=client)        ranks beside the workers
    model = ringreduce.dask.map(train, x, y)[0]                            ranks that are the workers, on their data

Nothing of Dask is imported before a function here is called.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ringreduce.api import joined
from ringreduce.errors import InputError, MissingExtraError, PeerLostError
from ringreduce.transport import joining
from ringrun import lending

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["map", "run"]

_LOOK_FOR_MORE_S = 1.0  # for workers that have come
_LOOK_S = 2.0  # whether Dask has lost a worker, whose task it would keep for ever
_NOTICED_S = 5.0  # for ranks to end that have waited for one that has failed


def run(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    client: Client | None = None,
    workers: str | Sequence[str] | None = None,
    elastic: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    **flags: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on one rank for each worker of a Dask cluster; returns the results, by rank.

    client:    of the cluster, by default the current one.
    workers:   addresses or names of some of its workers, by default all.
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
    client = client or _current()
    names = _workers(client, workers)
    if not names:
        raise InputError(f"ringreduce.dask.run(): the cluster has no workers{f' {workers}' if workers else ''}")
    lending.checked("ringreduce.dask.run()", args, len(names), elastic, {"min_np": min_np, "max_np": max_np, **flags})
    ticket = lending.ticket(timeout_s)
    lenders = _Lenders(client, ticket, (lambda: _workers(client, workers)) if max_np else None, max_np or len(names))
    lenders.add(names)
    asked = {**flags, "elastic": elastic or None, "min_np": min_np, "max_np": max_np}
    try:
        call = fn, tuple(args), dict(kwargs or {})
        np = min(len(names), lenders.most)
        results: list[Any] = lending.run(call, ticket, np, asked, env or {}, lenders.trouble)
        return results
    finally:
        client.cancel(list(lenders.futures.values()))


def _current() -> Client:
    try:
        from distributed import get_client
    except ImportError as error:
        raise MissingExtraError.of("ringreduce.dask needs Dask", "dask", error) from error
    try:
        found: Client = get_client()
        return found
    except ValueError as error:
        raise InputError("ringreduce.dask.run(): there is no Dask client here; pass client=Client(…)") from error


def _workers(client: Client, wanted: str | Sequence[str] | None) -> list[str]:
    """Return the addresses of the workers that there are, of those that are wanted."""
    wanted = [wanted] if isinstance(wanted, str) else wanted
    there = client.scheduler_info(n_workers=-1)["workers"]
    found = {address for address, each in there.items() if wanted is None or {address, each["name"]} & {*wanted}}
    return sorted(found, key=lambda address: (there[address]["host"], address))


class _Lenders:
    """The tasks that lend slots, one on each worker."""

    def __init__(self, client: Client, ticket: lending.Ticket, look: Callable[[], list[str]] | None, most: int) -> None:
        """look: returns the workers that there are, where those that come are to be used, up to `most`."""
        self._client, self._ticket, self._look, self.most = client, ticket, look, most
        self.futures: dict[str, Any] = {}
        """By the address of the worker."""
        self._look_at_s = time.monotonic() + _LOOK_FOR_MORE_S

    def add(self, names: Sequence[str]) -> None:
        """Let these workers lend a slot each, as far as there may be so many."""
        for name in names:
            if name not in self.futures and len(self.futures) < self.most:
                only = {"workers": [name], "allow_other_workers": False, "pure": False, "retries": 0}
                key = f"ringreduce-{uuid.uuid4().hex}"
                self.futures[name] = self._client.submit(lending.lend, self._ticket, key=key, **only)

    def trouble(self) -> str:
        """Return why a worker cannot lend; see to workers that have come and gone."""
        failed = [each for each in self.futures.values() if each.status == "error"]
        if self._look is None:
            return str(failed[0].exception()) if failed else ""
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + _LOOK_FOR_MORE_S
            there = self._look()
            self.futures = {name: each for name, each in self.futures.items() if name in there}
            self.add(there)
        return ""


def map(
    fn: Callable[..., Any], *collections: Any, client: Any = None, workers: Sequence[str] | None = None
) -> list[Any]:
    """Call `fn` in each of Dask's workers, as a rank, with the data stored there; return the results by rank.

        model = ringreduce.dask.map(train, x, y)[0]

    collections: Dask's arrays or dataframes, divided alike along the first axis. `fn` gets of each what this worker
                 holds, in one piece, which may be empty: an array or a dataframe. Chunks that are in no worker yet, or
                 elsewhere than the first collection's, are brought there.
    workers:     their addresses; by default all of the cluster, each with a thread that is free. `client`: by default
                 the current one.
    On several hosts needs MPICH. `ringreduce.init()` has been called when `fn` begins, and `shutdown()` is when it
    ends. The same workers can be called again, but not others together with them, since MPI starts once in a process.
    Raises: what `fn` has raised; the other ranks get PeerLostError. InputError for collections that do not fit.
            StartupError where workers have been ranks with others.
    Source: dask-mpi's issue 25 asks for it.
    """
    import distributed

    client = client or distributed.get_client()
    found = client.run(_where, workers=workers)
    names = sorted(found, key=lambda name: (found[name][0], name))
    if len({found[name][:2] for name in names}) < len(names):
        raise InputError("map: several of Dask's workers share a process, which can be one rank; use processes=True")
    ranks = joined.ranks_again(
        [found[name][2] for name in names], "get new workers, with client.restart() or from another cluster"
    )
    if ranks:
        names = [name for _, name in sorted(zip(ranks, names, strict=True))]
    held = _held(client, names, [_parts(each, number, collections[0]) for number, each in enumerate(collections)])
    empty = [_empty(each) for each in collections]
    here = {"allow_other_workers": False, "pure": False, "retries": 0}
    address = "" if ranks else client.submit(joining.start, len(names), workers=names[:1], **here).result()
    futures = [
        client.submit(_rank, fn, parts, empty, address, rank, len(names), workers=[name], **here)
        for rank, (name, parts) in enumerate(zip(names, held, strict=True))
    ]
    try:
        _wait(client, futures, names)
    finally:
        client.cancel([each for each in futures if not each.done()])
    errors = [each.exception() for each in futures if each.status == "error"]
    gone = [rank for rank, each in enumerate(futures) if not each.done()]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeerLostError))  # the others' follow from it
    if gone:
        raise PeerLostError(f"map: Dask has lost {', '.join(names[rank] for rank in gone)}, ranks {gone}", gone)
    return list(client.gather(futures))


def _wait(client: Any, futures: Sequence[Any], names: Sequence[str]) -> None:
    """Return when all have ended; or when one has failed, or its worker, and the others have had time to notice."""
    import distributed

    until_s = math.inf
    while (left := [each for each in futures if not each.done()]) and time.monotonic() < until_s:
        with contextlib.suppress(distributed.TimeoutError):
            distributed.wait(left, timeout=_LOOK_S, return_when="FIRST_COMPLETED")
        waits_for = {name for name, each in zip(names, futures, strict=True) if not each.done()}
        if any(each.status == "error" for each in futures) or not waits_for <= client.ncores().keys():
            until_s = min(until_s, time.monotonic() + _NOTICED_S)


def _where() -> tuple[str, int, Any]:
    return socket.gethostname(), os.getpid(), joined.membership()


def _rank(fn: Callable[..., Any], parts: list[Any], empty: list[Any], address: str, rank: int, size: int) -> Any:
    with joined.rank_of(address, rank, size, "Dask"):
        return fn(*(_in_one_piece(each) if each else none for each, none in zip(parts, empty, strict=True)))


def _parts(collection: Any, number: int, first: Any) -> list[Any]:
    """The parts of a collection along the first axis, divided as those of the first one."""
    which = f"map: collection {number}"
    if not hasattr(collection, "to_delayed") or getattr(collection, "ndim", 1) == 0:
        raise InputError(f"{which} is a {type(collection).__name__}; expected an array or a dataframe of Dask")
    if hasattr(collection, "rechunk"):
        rows = (first if hasattr(first, "rechunk") else collection).chunks[0]
        if sum(rows) != collection.shape[0]:  # or nobody knows, which is NaN
            raise InputError(f"{which} has {collection.shape[0]} rows, and the first one {sum(rows)}; expected as many")
        collection = collection.rechunk({0: rows, **dict.fromkeys(range(1, collection.ndim), -1)})
    parts = list(np.ravel(collection.to_delayed()))
    if len(parts) != (expected := first.numblocks[0] if hasattr(first, "rechunk") else first.npartitions):
        raise InputError(f"{which} has {len(parts)} partitions, and the first one {expected}; repartition it")
    return parts


def _held(client: Any, names: Sequence[str], collections: Sequence[Sequence[Any]]) -> list[list[list[Any]]]:
    """By rank and collection, the parts that it gets: where a part of the first one lies, those of the others go."""
    import distributed

    computed = [client.compute(each) for each in collections]
    held: list[list[list[Any]]] = [[[] for _ in collections] for _ in names]
    distributed.wait(computed)
    holders = client.who_has(computed[0]) if computed else {}
    for parts in zip(*computed, strict=True):
        ranks = [names.index(name) for name in holders.get(parts[0].key, ()) if name in names]
        rank = min(ranks or range(len(names)), key=lambda each: len(held[each][0]))
        for column, part in zip(held[rank], parts, strict=True):
            column.append(part)
    return held


def _empty(collection: Any) -> Any:
    if hasattr(collection, "rechunk"):
        return np.empty((0, *collection.shape[1:]), collection.dtype)
    return collection._meta


def _in_one_piece(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if hasattr(parts[0], "iloc"):
        import pandas as pd

        return pd.concat(parts)
    return np.concatenate(parts)
