"""ringreduce on Ray: ranks on the machines that Ray has.

    losses = ringreduce.ray.run(train, args=(0.1,), np=8, gpus=1)                            ranks beside its workers
    executor = ringreduce.ray.RayExecutor(num_workers=8, use_gpu=True)                       ranks that are its actors

Nothing of Ray is imported before a function here is called.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ringreduce.api import joined
from ringreduce.errors import InputError, MissingExtraError, PeerLostError, StartupError
from ringreduce.transport import joining
from ringrun import lending

__all__ = ["ElasticRayExecutor", "RayExecutor", "run"]

_NOTICED_S = 5.0  # for ranks to end that have waited for one that has failed
_LEAVE_S = 10.0  # for tasks to end that have lent slots
_HERE = "ringreduce.ray.run()"
_SLOTS = "since Horovod 0.22 it is num_workers_per_host, cpus_per_worker or gpus_per_worker; pass that"
_ELASTIC = (
    "actors that keep their state are not elastic; use ElasticRayExecutor, or ringreduce.ray.run(…, elastic=True)"
)


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
    try:
        import ray
        from ray.util.placement_group import remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ImportError as error:
        raise MissingExtraError.of("ringreduce.ray needs Ray", "ray", error) from error
    lending.checked(_HERE, args, np, elastic, {"min_np": min_np, "max_np": max_np, **flags})
    if not ray.is_initialized():
        ray.init()
    group, own = placement_group or ray.util.get_current_placement_group(), None
    tasks: Sequence[Any] = ()
    try:
        if group is None and not elastic:
            group = own = _group(ray, np, cpus, gpus, strategy, timeout_s)
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_retries": -1 if elastic else 0,  # on another node, or on one that comes
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group) if group else "SPREAD",
        }
        ticket = lending.ticket(timeout_s)
        lend = ray.remote(lending.lend).options(**options)
        tasks = [lend.remote(ticket) for _ in range(max_np or np)]
        call = fn, tuple(args), dict(kwargs or {})
        asked = {**flags, "elastic": elastic or None, "min_np": min_np, "max_np": max_np}
        results: list[Any] = lending.run(call, ticket, np, asked, env or {}, lambda: _trouble(ray, tasks, elastic))
        return results
    finally:
        _, left = ray.wait(list(tasks), num_returns=len(tasks), timeout=_LEAVE_S) if tasks else ((), ())
        for each in left:  # not by force, which ends Ray itself where a task is ending
            ray.cancel(each)
        if own is not None:
            remove_placement_group(own)


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
    failed = []
    for each in done:
        with contextlib.suppress(ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError):
            try:
                ray.get(each)
            except (ray.exceptions.RayTaskError, ray.exceptions.RuntimeEnvSetupError) as error:
                failed.append(str(error))
    return failed[0] if failed and not (elastic and more) else ""


class RayExecutor:
    """Ranks that are Ray actors, and therefore keep their state from call to call. On several hosts needs MPICH.

        executor = RayExecutor(RayExecutor.create_settings(), num_workers=4, use_gpu=True)
        executor.start()
        losses = executor.run(train, args=[0.1])
        executor.shutdown()

    num_workers:  how many ranks, wherever there is room; or num_hosts with num_workers_per_host each.
    cpus_per_worker, use_gpu, gpus_per_worker: what Ray reserves for each; by default one CPU, and no GPU or one.
    use_current_placement_group: take the bundles of the group in which this program runs, if it runs in one.
    It has Horovod's names, but those of elastic jobs: for these there is `ElasticRayExecutor`.
    Source: Horovod's horovod.ray.RayExecutor.
    """

    @staticmethod
    def create_settings(timeout_s: float = 300, placement_group_timeout_s: float = 100, **_: Any) -> dict[str, float]:
        """Return settings: how long ranks may take to start, and Ray to find room; others of Horovod's are ignored."""
        return {"timeout_s": timeout_s, "placement_group_timeout_s": placement_group_timeout_s}

    def __init__(
        self,
        settings: Mapping[str, float] | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        **elastic: Any,
    ) -> None:
        if (num_workers is None) == (num_hosts is None):
            raise InputError("RayExecutor: expected either num_workers= or num_hosts=")
        if gpus_per_worker and not use_gpu:
            raise InputError(f"RayExecutor: gpus_per_worker={gpus_per_worker}, but use_gpu is not True")
        if wanted := sorted(name for name, value in elastic.items() if value is not None):
            cure = _SLOTS if any("slot" in name for name in wanted) else _ELASTIC
            raise InputError(f"RayExecutor: {', '.join(wanted)}: {cure}")
        self.settings = {**self.create_settings(), **(settings or {})}
        self.num_workers = num_workers or (num_hosts or 0) * num_workers_per_host
        self.workers: list[Any] = []
        self._each = {"CPU": cpus_per_worker, **({"GPU": gpus_per_worker or 1} if use_gpu else {})}
        self._per_host = num_workers_per_host if num_hosts else 0
        self._takes_current, self._owns_group = use_current_placement_group, False
        self._group: Any = None

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks; each makes an `executable_cls` of these arguments, which `execute` gives to its function.

        Raises: StartupError where Ray has no room in time, or a rank does not start.
        """
        import ray

        if self.workers:
            raise StartupError("RayExecutor.start(): it has been started; call shutdown() first")
        try:
            actors = self._actors(ray.remote(_Rank))
            try:
                places = ray.get([each.where.remote() for each in actors], timeout=self.settings["timeout_s"])
            except ray.exceptions.GetTimeoutError:
                late = f"{len(actors)} actors of {self._each} have not started within {self.settings['timeout_s']:g} s"
                raise StartupError(f"RayExecutor.start(): {late}; see ray.available_resources()") from None
            nodes = list(dict.fromkeys(node for node, _ in places))  # ranks of a host follow each other
            order = sorted(range(len(actors)), key=lambda k: nodes.index(places[k][0]))
            self.workers = [actors[k] for k in order]
            address = ray.get(self.workers[0].begin.remote(len(actors)))
            made = executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {})
            starts = []
            for rank, k in enumerate(order):
                gpus = [gpu for node, ids in places if node == places[k][0] for gpu in ids]
                variables = {**(extra_env_vars or {}), **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
                starts.append(self.workers[rank].start.remote(address, rank, len(actors), variables, made))
            self._results(starts)
        except BaseException:
            self.shutdown()
            raise

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call fn(*args, **kwargs) on each rank; return the results by rank.

        Raises what a rank has raised; where others wait for that one all are ended, and start() starts new ones.
        """
        return self._results(self.run_remote(fn, args, kwargs))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """As `run`, and return Ray's references to the results at once."""
        return [each.run.remote(fn, tuple(args or ()), dict(kwargs or {})) for each in self._started("run")]

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call fn(executable) on each rank; return the results by rank."""
        return self._results([each.execute.remote(fn) for each in self._started("execute")])

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call fn(executable) on rank 0; return its result."""
        import ray

        return ray.get(self._started("execute_single")[0].execute.remote(fn))

    def shutdown(self) -> None:
        """End the ranks, and give back what was reserved. Idempotent."""
        import ray

        for each in self.workers:
            ray.kill(each)
        self.workers = []
        if self._group is not None and self._owns_group:
            ray.util.remove_placement_group(self._group)  # and with it actors that are no ranks yet
        self._group = None

    def _started(self, called: str) -> list[Any]:
        if not self.workers:
            raise StartupError(f"RayExecutor.{called}(): there are no ranks; call start() first")
        return self.workers

    def _actors(self, actor: Any) -> list[Any]:
        from ray.util.placement_group import get_current_placement_group, placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        timeout_s, per_host = self.settings["placement_group_timeout_s"], self._per_host
        bundles, strategy = [self._each] * self.num_workers, "PACK"
        if per_host:
            host = {name: per_host * count for name, count in self._each.items()}
            bundles, strategy = [host] * (self.num_workers // per_host), "STRICT_SPREAD"
        self._group = get_current_placement_group() if self._takes_current else None
        self._owns_group = self._group is None
        if self._group is None:
            self._group = placement_group(bundles, strategy=strategy)
        if not self._group.wait(timeout_s):
            raise StartupError(
                f"RayExecutor.start(): Ray has had no room for {bundles} within {timeout_s:g} s; "
                "see ray.cluster_resources()"
            )
        placed = [k // (per_host or 1) if self._owns_group else -1 for k in range(self.num_workers)]
        kinds = {"num_cpus": self._each["CPU"], "num_gpus": self._each.get("GPU", 0)}
        return [
            actor.options(
                **kinds,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle),
            ).remote()
            for bundle in placed
        ]

    def _results(self, references: Sequence[Any]) -> list[Any]:
        import ray

        errors: list[Exception] = []
        done, left = ray.wait(list(references))
        until_s = math.inf
        while done:
            for each in done:
                try:
                    ray.get(each)
                except Exception as error:
                    errors.append(error)
                    until_s = min(until_s, time.monotonic() + _NOTICED_S)
            left_s = max(0.0, until_s - time.monotonic())
            done, left = ray.wait(left, timeout=left_s if errors else None) if left else ([], [])
        if left or any(isinstance(each, PeerLostError | ray.exceptions.RayActorError) for each in errors):
            self.shutdown()
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerLostError))  # the others' follow from it
        return list(ray.get(list(references)))


class ElasticRayExecutor:
    """Elastic jobs by the names of Horovod: ranks beside Ray's workers, which go on without those that are lost.

        executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2), use_gpu=True)
        executor.start()
        losses = executor.run(train)

    The job begins with as many ranks as the cluster has room for, of at most max_num_proc; otherwise it is that of
    `run(train, elastic=True)`.

    cpus_per_slot, use_gpu, gpus_per_slot: what Ray reserves for each rank; by default one CPU, and no GPU or one.
    env_vars:            variables for the ranks.
    override_discovery:  Horovod's, without effect: Ray itself tells which hosts there are.
    Source: Horovod's horovod.ray.ElasticRayExecutor.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 60,
        *,
        min_np: int | None = None,
        max_np: int | None = None,
        **_: Any,
    ) -> types.SimpleNamespace:
        """Return settings: how many ranks at least and at most, by either name, and how long they may take to start.

        elastic_timeout, reset_limit, and others: Horovod's, without effect.
        """
        limits = {"min_np": min_np or min_num_proc, "max_np": max_np or max_num_proc}
        return types.SimpleNamespace(**limits, timeout_s=timeout_s)

    def __init__(
        self,
        settings: Any = None,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot and not use_gpu:
            raise InputError(f"ElasticRayExecutor: gpus_per_slot={gpus_per_slot}, but use_gpu is not True")
        self.settings = settings or self.create_settings()
        self._cpus, self._gpus = cpus_per_slot, (gpus_per_slot or 1) if use_gpu else 0
        self._env = env_vars

    def start(self) -> None:
        """Do nothing: `run` starts the ranks."""

    def run(self, worker_fn: Callable[[], Any], callbacks: Any = None) -> list[Any]:
        """Call worker_fn() on each rank; return the results of those that are left in the end.

        Raises: InputError with callbacks, which Horovod calls in this process; otherwise as `ringreduce.ray.run`.
        """
        import ray

        if callbacks:
            raise InputError("ElasticRayExecutor.run: there are no callbacks; print in worker_fn: it comes here")
        if not ray.is_initialized():
            ray.init()
        wanted, has = self.settings, ray.cluster_resources()
        room = [int(has.get(kind, 0) / each) for kind, each in {"CPU": self._cpus, "GPU": self._gpus}.items() if each]
        ranks = max(wanted.min_np, min([*room, wanted.max_np or math.inf]))
        each = {"cpus": self._cpus, "gpus": self._gpus, "env": self._env, "timeout_s": wanted.timeout_s}
        return run(worker_fn, np=ranks, elastic=True, min_np=wanted.min_np, max_np=wanted.max_np, **each)


class _Rank:
    """An actor."""

    def where(self) -> tuple[str, list[str]]:
        import ray

        return ray.get_runtime_context().get_node_id(), [str(each) for each in ray.get_gpu_ids()]

    def begin(self, size: int) -> str:
        return joining.start(size)

    def start(self, address: str, rank: int, size: int, variables: Mapping[str, str], made: tuple[Any, ...]) -> None:
        os.environ.update(variables)
        self._rank = joined.rank_of(address, rank, size, "Ray")
        self._rank.__enter__()
        cls, args, kwargs = made
        self._executable = cls(*args, **kwargs) if cls else None

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return fn(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        return fn(self._executable)
