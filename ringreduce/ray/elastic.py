"""Elastic jobs by Horovod's names."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from typing import Any

from ringreduce.errors import InputError

from .tasks import imported, run


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
        given = settings if isinstance(settings, Mapping | None) else vars(settings)
        self.settings = types.SimpleNamespace(**{**vars(self.create_settings()), **(given or {})})
        self._cpus, self._gpus = cpus_per_slot, (gpus_per_slot or 1) if use_gpu else 0
        self._env = env_vars

    def start(self) -> None:
        """Do nothing: `run` starts the ranks."""

    def run(self, worker_fn: Callable[[], Any], callbacks: Any = None) -> list[Any]:
        """Call worker_fn() on each rank; return the results of those that are left in the end.

        Raises: InputError with callbacks, which Horovod calls in this process; otherwise as `ringreduce.ray.run`.
        """
        ray = imported()
        if callbacks:
            raise InputError(
                "ElasticRayExecutor.run: callbacks are not supported; print in worker_fn: its output appears here"
            )
        if not ray.is_initialized():
            ray.init()
        wanted, has = self.settings, ray.cluster_resources()
        room = [int(has.get(kind, 0) / each) for kind, each in {"CPU": self._cpus, "GPU": self._gpus}.items() if each]
        ranks = max(wanted.min_np, min([*room, wanted.max_np or math.inf]))
        each = {"cpus": self._cpus, "gpus": self._gpus, "env": self._env, "timeout_s": wanted.timeout_s}
        return run(worker_fn, np=ranks, elastic=True, min_np=wanted.min_np, max_np=wanted.max_np, **each)
