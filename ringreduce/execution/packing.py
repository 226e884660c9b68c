"""Packs one bucket of a batch, runs its collective, and unpacks it; the buckets' phases in the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import fusion, shared
from ringreduce.collectives.ops import Reduction
from ringreduce.execution.batch import Batch
from ringreduce.execution.context import Context
from ringreduce.transport.base import Steps

PHASES = {shared.PACK: "MEMCPY_IN_FUSION_BUFFER", shared.REDUCE: "ALLREDUCE", shared.COPY: "MEMCPY_OUT_FUSION_BUFFER"}
"""The phases of a bucket in the timeline."""
Collective = Callable[[Any, Any], Steps[None]]
"""Called with a bucket's elements, changed in place, and its sums where those have a wider type, else None."""


def watcher(batch: Batch, buckets: Sequence[fusion.Bucket], context: Context) -> shared.OnPhase:
    """Records the phases of each bucket in the timeline; after the last one its owners may complete."""

    def watch(number: int, phase: int) -> None:
        owners = batch.owners_of(buckets[number])
        if context.timeline.recording:
            context.timeline.switch_phase(owners, PHASES.get(phase))
        if phase == shared.DONE:
            context.completions.settle(owners)

    return watch


def carry(
    batch: Batch,
    bucket: fusion.Bucket,
    collective: Collective,
    phase: str,
    context: Context,
    wide: Reduction | None = None,
) -> Steps[None]:
    """Pack a bucket, run the collective, unpack; a single piece stays in the output's own memory.

    wide: pack in its `sum_type`; the finished elements follow in the block.
    """
    timeline, owners = context.timeline, batch.owners_of(bucket)
    if len(bucket.pieces) == 1 and wide is None:
        number, low, high = bucket.pieces[0]
        flat = batch.outputs[number].flat[low:high]
        if batch.outputs[number] is not batch.inputs[number]:
            flat[...] = batch.inputs[number].flat[low:high]
        with timeline.phase(owners, phase):
            yield from collective(flat, None)
    else:
        like = batch.inputs[0]
        storage = like.element.storage
        with context.fusion_buffer.block() as block:
            partial = view(block, storage if wide is None else wide.sum_type)[: bucket.length]
            with timeline.phase(owners, "MEMCPY_IN_FUSION_BUFFER"):
                fusion.pack(bucket, batch.inputs, partial, widen=None if wide is None else wide.widen)
            finished = partial if wide is None else view(block[partial.nbytes :], storage)[: bucket.length]
            with timeline.phase(owners, phase):
                yield from collective(finished, None if wide is None else partial)
            with timeline.phase(owners, "MEMCPY_OUT_FUSION_BUFFER"):
                fusion.unpack(bucket, finished, batch.outputs)
    context.completions.settle(owners)


def buckets_of(batch: Batch, context: Context, itemsize: int, alignment: int = 1) -> Sequence[fusion.Bucket]:
    """The buckets of a batch whose elements need `itemsize` bytes each in the fusion buffer.

    alignment: see `fusion.plan`; where a slot is shorter, 1.
    """
    capacity = max(1, context.settings.fusion_slot_bytes // itemsize)
    alignment = alignment if alignment <= capacity else 1
    return fusion.plan(batch.counts, capacity // alignment * alignment, alignment=alignment, whole=True)


def view(block: Any, dtype: np.dtype[Any]) -> Any:
    """A block of bytes as elements of `dtype`."""
    return block[: block.size // dtype.itemsize * dtype.itemsize].view(dtype)
