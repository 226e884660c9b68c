"""The all-reduce algorithms that send messages, by name, for one bucket on one channel."""

from __future__ import annotations

from typing import Any

from ringreduce.collectives import direct, doubling, halving, quantized, ring
from ringreduce.collectives.ops import Reduction
from ringreduce.execution.context import Context
from ringreduce.execution.packing import view
from ringreduce.transport.base import Steps


def is_wide(algorithm: str, reduction: Reduction) -> bool:
    """True where elements are reduced as `sum_type`, beside the finished ones."""
    return not reduction.in_place and (algorithm in ("ring", "halving") or reduction.wire is not None)


def allreduce(
    algorithm: str, reduction: Reduction, channel: int, context: Context, finished: Any, partial: Any
) -> Steps[None]:
    """Reduce `finished` in place, or `partial` into it."""
    algorithms = context.algorithms
    transport, segment_bytes = algorithms.channels[channel], algorithms.segment_bytes
    if reduction.wire is not None:
        partial = finished if partial is None else partial
        reduction.prescaled(partial)
        yield from quantized.allreduce(finished, transport, reduction, segment_bytes, ring.Workspace(partial, None))
    elif algorithm == "direct":
        yield from direct.allreduce(finished, transport, reduction, segment_bytes)
    elif algorithm == "doubling":
        yield from doubling.allreduce(finished, transport, reduction)
    else:
        partial = finished if partial is None else partial
        reduction.prescaled(partial)
        with context.fusion_buffer.block() as block:  # receives segments
            scratch = view(block, reduction.sum_type)
            segment_bytes = min(segment_bytes, scratch.nbytes // ring.RECEIVES_AHEAD)
            workspace = ring.Workspace(partial, scratch)
            reduce = halving.allreduce if algorithm == "halving" else ring.allreduce
            yield from reduce(finished, algorithms.ring_channels[channel], reduction, segment_bytes, workspace)
