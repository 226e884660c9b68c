"""Ranks beside Ray's workers: tasks lend slots to a job, which is ringrun's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ringreduce.errors import InputError, MissingExtraError, StartupError
from ringrun import lending

_LEAVE_S = 10.0  # for tasks to end that have lent slots
_NO_RANKS_S = 1.0  # where no rank has run there
_HERE = "ringreduce.ray.run()"
_NAMES = {"num_proc": "np=", "min_num_proc": "min_np=", "max_num_proc": "max_np="}


def run(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int = 1,
    cpus: float = 1,
    gpus: float = 0,
    elastic: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    placement_group: Any = None,
    strategy: str = "PACK",
    env: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    **flags: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on each of `np` ranks on Ray's nodes; returns the results, by rank.

    np:              how many ranks; a Ray task holds the resources of each.
    cpus, gpus:      of each rank. The GPUs of a host are divided among its ranks.
    elastic:         ranks go on without those that fail, down to min_np; with max_np, nodes that come later are used,
                     from the next commit on. The results are those of the ranks that are left in the end.
    placement_group: one that exists, by default that of the task or actor that calls this; where there is none, and the
                     job is not elastic, one is made, with a bundle for each rank, and removed in the end.
    strategy:        of the one that is made: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
    env:             variables for the ranks.
    timeout_s:       how long Ray may take to find room, and tasks to begin.
    flags:           ringrun's, as of `ringreduce.run`.

    Each rank is a process beside a worker of Ray's, with the Python, the folder, the import path and the variables that
    the runtime environment gives to that one.

    Raises: JobFailedError when a rank fails, with ringrun's report; StartupError when Ray has no room, or tasks cannot
            run ranks; InputError; KeyboardInterrupt once all ranks have ended; MissingExtraError without Ray.

    >>> losses = run(train, args=(0.1,), np=8, gpus=1)                                                 # doctest: +SKIP
    """
    ray = imported()
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    lending.check_seconds(timeout_s)  # before Ray is asked for room
    call = lending.call_of(_HERE, fn, args, kwargs)
    np, asked = lending.checked(_HERE, np, {"min_np": min_np, "max_np": max_np}, elastic, flags, _NAMES)
    if not ray.is_initialized():
        ray.init()
    group, own = placement_group or ray.util.get_current_placement_group(), None
    tasks: list[Any] = []
    count, leave_s = 0, _LEAVE_S
    try:
        if group is None and not elastic and (cpus or gpus):  # there is no bundle of nothing
            group = own = _group(ray, np, cpus, gpus, strategy, timeout_s)
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_retries": -1 if elastic else 0,  # on another node, or on one that comes
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group) if group else "SPREAD",
        }
        ticket = lending.ticket(timeout_s)
        lend = ray.remote(lending.lend).options(**options)

        def trouble() -> str:
            tasks.extend(lend.remote(ticket) for _ in range(0 if tasks else asked.get("max_np", np)))
            return _trouble(ray, tasks, elastic)

        results: list[Any] = lending.run(call, ticket, np, asked, env or {}, trouble)
        count = len(results)  # more tasks of an elastic job begin when there is room, and find no head
        return results
    except (InputError, StartupError):
        leave_s = _NO_RANKS_S
        raise
    finally:
        _, left = ray.wait(tasks, num_returns=count or len(tasks), timeout=leave_s) if tasks else ((), ())
        for each in left:  # not by force, which ends Ray itself where a task is ending
            ray.cancel(each)
        if own is not None:
            remove_placement_group(own)


def imported() -> Any:
    """The module Ray; raises MissingExtraError where it is not installed."""
    try:
        import ray
        from ray import util  # noqa: F401 - a folder of that name has none
    except ImportError as error:
        raise MissingExtraError.of("ringreduce.ray needs Ray", "ray", error) from error
    return ray


def _group(ray: Any, np: int, cpus: float, gpus: float, strategy: str, timeout_s: float) -> Any:
    """Return a placement group with room for all ranks."""
    bundle = {name: count for name, count in {"CPU": cpus, "GPU": gpus}.items() if count}
    group = ray.util.placement_group([bundle] * np, strategy=strategy)
    try:
        ray.get(group.ready(), timeout=timeout_s)
    except BaseException as error:
        ray.util.remove_placement_group(group)
        if not isinstance(error, ray.exceptions.GetTimeoutError):
            raise
        has = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        what = f"Ray had no room for {np} ranks of {bundle} within {timeout_s:g} s; the cluster has {has}"
        raise StartupError(f"{_HERE}: {what}; ask for less, or wait longer: timeout_s") from None
    return group


def _trouble(ray: Any, tasks: Sequence[Any], elastic: bool) -> str:
    """Return why tasks cannot lend: one of them, or of an elastic job all. A task that is lost is a lost host."""
    done, more = ray.wait(list(tasks), num_returns=len(tasks), timeout=0)
    of = ray.exceptions
    lost = of.WorkerCrashedError, of.NodeDiedError, of.LocalRayletDiedError, of.OutOfMemoryError
    failed = []
    for each in done:
        try:
            ray.get(each)
        except of.RayError as error:
            if not isinstance(error, lost):
                failed.append(str(error))
    return failed[0] if failed and not (elastic and more) else ""
