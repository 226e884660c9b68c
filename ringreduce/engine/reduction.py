"""The all-reduce of many tensors: by which algorithm each batch goes, and how its slots move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ringreduce import fusion
from ringreduce.collectives import direct, doubling, hierarchical, ring, shared
from ringreduce.collectives.overlap import overlapped
from ringreduce.engine.batch import Batch, batches, carry, plan, settle, view
from ringreduce.engine.context import Context
from ringreduce.engine.request import Request
from ringreduce.log import LOGGER
from ringreduce.ops import ReduceOp, Reduction
from ringreduce.transport.base import Steps

PHASES = {shared.PACK: "MEMCPY_IN_FUSION_BUFFER", shared.REDUCE: "ALLREDUCE", shared.COPY: "MEMCPY_OUT_FUSION_BUFFER"}


def allreduce(requests: Sequence[Request], context: Context) -> Steps[None]:
    """Reduce what all these requests hold; they agree in op and scales. Completes each as soon as it is finished."""
    work = []
    for batch in batches(requests):
        reduction = _reduction(requests[0], batch, context)
        algorithm = _algorithm(batch, reduction, context)
        slots = _slots(batch, reduction, algorithm, context)
        batch.expect(slots)
        if context.debugs:
            what = f"allreduce of {len(batch.inputs)} tensors, {batch.nbytes} B of {reduction.element.name}"
            LOGGER.debug(f"{what}: {algorithm}, in {len(slots)} slots")
        work.append((batch, reduction, algorithm, slots))
    for request in requests:
        settle(request, context)
    for batch, reduction, algorithm, slots in work:
        if algorithm in ("shared", "hierarchical"):
            yield from _through_window(batch, reduction, algorithm, slots, context)
        else:
            width = context.knobs.slots_in_flight
            yield from overlapped(_through_messages(batch, reduction, algorithm, slots, context), width)


def _reduction(request: Request, batch: Batch, context: Context) -> Reduction:
    details = request.description
    return Reduction(
        ReduceOp(details.detail("op")),
        batch.inputs[0].element,
        context.divisor,
        details.detail("prescale_factor"),
        details.detail("postscale_factor"),
    )


def _algorithm(batch: Batch, reduction: Reduction, context: Context) -> str:
    if not isinstance(batch.inputs[0].flat, np.ndarray):
        return "direct" if context.settings.deterministic else "ring"  # for now the ones that take GPU memory
    return context.routes.choice(batch.nbytes, reduction, context.knobs.algorithm)


def _slots(batch: Batch, reduction: Reduction, algorithm: str, context: Context) -> Sequence[fusion.Slot]:
    itemsize = reduction.element.itemsize
    region = context.routes.region
    if algorithm in ("shared", "hierarchical") and region is not None:
        return fusion.stream(batch.counts, min(context.knobs.shared_slot_bytes, region.slot_bytes) // itemsize)
    if algorithm == "ring" and not reduction.in_place:
        itemsize += reduction.sum_type.itemsize  # the finished elements lie behind the sums
    return plan(batch, context, itemsize)


def _through_window(
    batch: Batch, reduction: Reduction, algorithm: str, slots: Sequence[fusion.Slot], context: Context
) -> Steps[None]:
    inputs = [each.flat for each in batch.inputs]
    outputs = [each.flat for each in batch.outputs]
    parts = [
        [shared.Part(inputs[number][low:high], outputs[number][low:high]) for number, low, high in slot.pieces]
        for slot in slots
    ]
    timeline = context.timeline

    def watch(number: int, phase: int) -> None:
        if timeline.recording:
            timeline.turn(batch.names(slots[number]), PHASES.get(phase))
        if phase == shared.DONE:
            batch.settle(slots[number], context)

    routes, segment_bytes = context.routes, context.routes.segment_bytes
    if algorithm == "shared" and routes.region is not None:
        yield from shared.allreduce(parts, routes.region, reduction, watch)
    elif routes.hierarchy is not None:
        yield from hierarchical.allreduce(parts, routes.hierarchy, reduction, segment_bytes, watch)


def _through_messages(
    batch: Batch, reduction: Reduction, algorithm: str, slots: Sequence[fusion.Slot], context: Context
) -> Iterator[Steps[None]]:
    """The slots' ways, one after the other; `overlapped` begins the next when a channel is free."""
    wide = reduction if algorithm == "ring" and not reduction.in_place else None
    for number, slot in enumerate(slots):
        collective = _Collective(algorithm, batch, reduction, number % context.knobs.slots_in_flight, context)
        yield carry(batch, slot, collective.run, "ALLREDUCE", context, wide)


class _Collective:
    """One of the algorithms that send messages, on one channel."""

    def __init__(self, algorithm: str, batch: Batch, reduction: Reduction, channel: int, context: Context) -> None:
        self.algorithm, self.batch, self.reduction, self.context = algorithm, batch, reduction, context
        self.transport = context.routes.channels[channel]

    def run(self, finished: Any, partial: Any) -> Steps[None]:
        """Reduce `finished` in place, or `partial` into it."""
        if self.algorithm == "ring":
            yield from self.ring(finished, finished if partial is None else partial)
        elif self.algorithm == "direct":
            yield from direct.allreduce(finished, self.transport, self.reduction, self.context.routes.segment_bytes)
        elif self.algorithm == "doubling":
            yield from doubling.allreduce(finished, self.transport, self.reduction)
        else:
            yield from self.native(finished)

    def ring(self, finished: Any, partial: Any) -> Steps[None]:
        """Around the ring, with a block of the fusion buffer for what comes in."""
        self.reduction.prescaled(partial)
        with self.context.memory.block(self.batch.inputs[0]) as block:
            scratch = view(block, self.reduction.sum_type)
            segment_bytes = min(self.context.routes.segment_bytes, scratch.nbytes // ring.RECEIVES_AHEAD)
            workspace = ring.Workspace(partial, scratch)
            yield from ring.allreduce(finished, self.transport, self.reduction, segment_bytes, workspace)

    def native(self, finished: Any) -> Steps[None]:
        """MPI's own; the ring where MPI has no such op for these elements."""
        native = self.context.routes.native
        start = None if native is None else native(finished, self.reduction.op.value)
        if start is None:
            yield from self.ring(finished, finished)
            return
        self.reduction.prescaled(finished)
        yield start()
        self.reduction.finish(finished, finished)
