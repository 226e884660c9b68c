"""The all-reduce algorithms that send messages, by name, for one bucket on one channel."""

from __future__ import annotations

from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.collectives import direct, doubling, ring
from ringreduce.execution.batch import view
from ringreduce.execution.context import Context
from ringreduce.ops import Reduction
from ringreduce.transport.base import Steps


class PointToPointAllreduce:
    """One algorithm on one channel. like: a buffer on the buckets' device."""

    def __init__(self, algorithm: str, like: Buffer, reduction: Reduction, channel: int, context: Context) -> None:
        self.algorithm, self.like, self.reduction, self.context = algorithm, like, reduction, context
        self.transport = context.algorithms.channels[channel]

    def run(self, finished: Any, partial: Any) -> Steps[None]:
        """Reduce `finished` in place, or `partial` into it."""
        if self.algorithm == "ring":
            partial = finished if partial is None else partial
            self.reduction.prescaled(partial)
            yield from self._ring(finished, partial)
        elif self.algorithm == "direct":
            yield from direct.allreduce(finished, self.transport, self.reduction, self.context.algorithms.segment_bytes)
        else:
            yield from doubling.allreduce(finished, self.transport, self.reduction)

    def _ring(self, finished: Any, partial: Any) -> Steps[None]:
        """Reduce `partial`, which is prescaled, around the ring; a block of the fusion buffer receives segments."""
        with self.context.memory.block(self.like) as block:
            scratch = view(block, self.reduction.sum_type)
            segment_bytes = min(self.context.algorithms.segment_bytes, scratch.nbytes // ring.RECEIVES_AHEAD)
            workspace = ring.Workspace(partial, scratch)
            yield from ring.allreduce(finished, self.transport, self.reduction, segment_bytes, workspace)
