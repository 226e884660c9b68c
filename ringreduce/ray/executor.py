"""Ranks that are Ray's actors, and keep their state from call to call."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringreduce.api import joined
from ringreduce.errors import InputError, PeerLostError, StartupError
from ringreduce.transport import joining
from ringrun import lending
from ringrun.environment import RankInfo, horovods_variables

from .tasks import imported

_NOTICED_S = 5.0  # for ranks to end that have waited for one that has failed
_SLOTS = "since Horovod 0.22 it is num_workers_per_host, cpus_per_worker or gpus_per_worker; pass that"
_ELASTIC = (
    "actors that keep their state are not elastic; use ElasticRayExecutor, or ringreduce.ray.run(…, elastic=True)"
)


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
    def create_settings(
        timeout_s: float = 300, *, placement_group_timeout_s: float = 100, **_: Any
    ) -> dict[str, float]:
        """Return settings: how long ranks may take to start, and Ray to find room; others of Horovod's are ignored."""
        return {"timeout_s": timeout_s, "placement_group_timeout_s": placement_group_timeout_s}

    def __init__(
        self,
        settings: Any = None,
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
        given = settings if isinstance(settings, Mapping | None) else vars(settings)
        self.settings = {**self.create_settings(), **(given or {})}
        counts = {"num_workers": num_workers, "num_hosts": num_hosts, "num_workers_per_host": num_workers_per_host}
        for name, count in counts.items():
            if count is not None:
                lending.count_of(f"RayExecutor: {name}", count)
        if not (cpus_per_worker or use_gpu):
            raise InputError("RayExecutor: cpus_per_worker=0: Ray reserves nothing for such ranks; pass 1 or more")
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

        Raises: StartupError where Ray has no room in time, or a rank does not start; MissingExtraError without Ray.
        """
        ray = imported()
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
            starts, on = [], [places[k][0] for k in order]
            for rank, mine in enumerate(on):
                # once each, though several may share one: CUDA sees none where a GPU is listed twice
                gpus = dict.fromkeys(gpu for node, ids in places if node == mine for gpu in ids)
                info = RankInfo(rank, len(on), on[:rank].count(mine), on.count(mine))
                variables = {**horovods_variables(info), **(extra_env_vars or {})}
                variables |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
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
        return imported().get(self._started("execute_single")[0].execute.remote(fn))

    def shutdown(self) -> None:
        """End the ranks, and give back what was reserved. Idempotent."""
        ray = imported()
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
        ray = imported()
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
        with joined.without_exit():
            self._executable = cls(*args, **kwargs) if cls else None

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with joined.without_exit():
            return fn(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        with joined.without_exit():
            return fn(self._executable)
