"""What operations of one process set need; their completions, in groups, so that waking waiters costs less."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.collectives import fusion
from ringreduce.errors import InputError
from ringreduce.execution.algorithms import Algorithms
from ringreduce.execution.gpu_backend import GpuBackend
from ringreduce.execution.signature import ranks_text
from ringreduce.execution.submission import Submission
from ringreduce.execution.timeline import Timeline
from ringreduce.settings import Settings
from ringreduce.settings.log import LOGGER
from ringreduce.transport.base import Steps, Transport

COMPLETION_INTERVAL_S = 2e-3
"""Shortest time between wakeups: a waiter woken after every bucket would compete with the engine for the core."""


class Completions:
    """The finished submissions of one process set. Call `flush` before the set waits for another rank, or is idle."""

    def __init__(self) -> None:
        self.settled: list[Submission] = []
        self._flushed_s = 0.0

    def settle(self, submissions: Iterable[Submission]) -> None:
        """A piece of each, or its planning, is finished; the last piece completes it, now or at a flush."""
        for submission in submissions:
            missing = submission.missing_pieces = submission.missing_pieces - 1
            if not missing:
                self.settled.append(submission)
        if time.monotonic() - self._flushed_s > COMPLETION_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Complete all finished submissions now."""
        submissions, self.settled = self.settled, []
        for submission in submissions:
            submission.complete()
        self._flushed_s = time.monotonic()


Operation = Callable[[list[Submission], "Context"], Steps[None]]
"""Runs submissions that are fused, or one."""


@dataclasses.dataclass
class Context:
    """What operations of one process set need."""

    algorithms: Algorithms
    members: tuple[int, ...]  # ranks of the world, by rank in the set
    settings: Settings
    fusion_buffer: fusion.FusionBuffer
    timeline: Timeline
    make_gpu: dataclasses.InitVar[Callable[[Context], GpuBackend]]
    operations: Mapping[str, Operation] = dataclasses.field(default_factory=dict)
    """By kind: those that are not execution's own, but must run in the same order."""
    debugs: bool = dataclasses.field(default_factory=lambda: LOGGER.isEnabledFor(logging.DEBUG))
    draws: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    """Seeds of stochastic rounding: one for each batch, in the order in which all ranks run them."""
    completions: Completions = dataclasses.field(default_factory=Completions)
    busy: dict[Any, None] = dataclasses.field(default_factory=dict)
    """The executors of one engine that have anything to do, in the order in which they began."""
    gpu: GpuBackend = dataclasses.field(init=False)

    def __post_init__(self, make_gpu: Callable[[Context], GpuBackend]) -> None:
        self.gpu = make_gpu(self)

    @property
    def transport(self) -> Transport:
        """The transport of operations that run one at a time."""
        return self.algorithms.channels[0]

    def empty(self, like: Buffer, shape: tuple[int, ...]) -> Buffer:
        """A new buffer on the device and of the element type of `like`."""
        return self.gpu.empty(like, shape) if like.on_gpu else like.empty(shape)

    def set_rank(self, kind: str, root_rank: Any) -> int:
        """The rank in the set of a rank of the world; raises InputError for a rank outside the set."""
        if not isinstance(root_rank, int) or root_rank not in self.members:
            what = f"a rank from 0 to {len(self.members) - 1}"
            if self.members != tuple(range(len(self.members))):
                what = f"one of the process set's {ranks_text(self.members)}"
            raise InputError(f"{kind}: root_rank={root_rank!r}; expected {what}")
        return self.members.index(root_rank)
