"""What is run once all ranks of a process set agree: fusion and the collectives. Generators, driven by the engine.

Everything here runs alike on all ranks: the order and the plan depend on what was agreed on only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import adasum, bruck, pairwise, ring, tree
from ringreduce.engine.batch import batches, carry, plan
from ringreduce.engine.context import Context
from ringreduce.engine.reduction import allreduce
from ringreduce.engine.request import Request
from ringreduce.errors import InputError
from ringreduce.gpu.through_host import GpuBroadcast, down, room, up
from ringreduce.ops import Adasum
from ringreduce.partition import chunk_bounds
from ringreduce.transport.base import Steps


def run(requests: Sequence[Request], context: Context, divisor: int) -> Steps[None]:
    """Run what was agreed on; completes each request as soon as its tensors are finished.  divisor: see Context."""
    context.divisor = divisor
    batches: dict[Any, list[Request]] = {}
    for request in requests:
        if request.ready:
            context.gpu.begin(request)
        kind = request.description.kind
        if kind == "allreduce" and request.description.detail("op") == Adasum.value:
            kind = "adasum"
        # one batch for all that may travel together: a tensor of another kind does not end it
        batches.setdefault((kind, request.description.details if kind in FUSED else request.key), []).append(request)
    for (kind, _), batch in batches.items():
        try:
            yield from OPERATIONS[kind](batch, context)
        except InputError as exc:  # all ranks find the same wrong
            for request in batch:
                request.fail(exc)
        context.completions.flush()  # what comes next, such as a barrier, may complete its own at once


def _adasum(requests: Sequence[Request], context: Context) -> Steps[None]:
    """Each tensor on its own: how much two gradients have in common is a matter of the layer."""
    size = len(context.members)
    if size & (size - 1):
        raise InputError(f"op=Adasum: {size} ranks; expected a power of two, such as 2, 4 or 8")
    for request in requests:
        for source, target in zip(request.inputs, request.outputs, strict=True):
            reduction = context.reduction(request, source.element)
            flat = yield from down(source, context)
            if not target.on_gpu and target is not source:
                target.flat[...], flat = flat, target.flat
            partial = reduction.start(flat)
            with context.timeline.phase([request], "ADASUM"):
                yield from adasum.allreduce(partial, context.transport)
            reduction.finish(partial, flat)
            up(flat, target, context)
        request.complete()


def _broadcast(requests: Sequence[Request], context: Context) -> Steps[None]:
    root = context.place("broadcast", requests[0].description.detail("root_rank"))

    def collective(flat: Any, _: Any) -> Steps[None]:
        yield from tree.broadcast(flat, context.transport, root)

    found = batches(requests)
    on_gpu = [GpuBroadcast(each, root, context) for each in found if each.on_gpu]
    planned = [(batch, plan(batch, context, batch.inputs[0].element.itemsize)) for batch in found if not batch.on_gpu]
    for batch, slots in planned:
        batch.expect(slots)
    for request in requests:
        context.completions.settle(request)
    for each in on_gpu:
        yield from each.run()
    for batch, slots in planned:
        for slot in slots:
            yield from carry(batch, slot, collective, "BROADCAST", context)


def _allgather(requests: Sequence[Request], context: Context) -> Steps[None]:
    """Rows may differ per rank: their numbers travel first, those of all tensors of a group together."""
    transport, rank = context.transport, context.transport.rank
    for request in requests:
        mine = np.array([tensor.shape[0] for tensor in request.inputs], np.int64)
        rows = yield from bruck.allgather(mine, transport)
        request.outputs = outputs = []
        for number, tensor in enumerate(request.inputs):
            counts = [int(n) * math.prod(tensor.shape[1:]) for n in rows[:, number]]
            gathered = context.empty(tensor, (int(rows[:, number].sum()), *tensor.shape[1:]))
            with context.timeline.phase([request], "ALLGATHER"):
                flat, start = room(gathered), sum(counts[:rank])
                flat[start : start + tensor.count] = yield from down(tensor, context)
                yield from ring.allgather(flat, transport, counts, rank, context.routes.segment_bytes)
                up(flat, gathered, context)
            outputs.append(gathered)
        request.payload = rows
        request.complete()


def _alltoall(requests: Sequence[Request], context: Context) -> Steps[None]:
    """`payload` is this rank's splits, and becomes (splits, the rows that came from each rank)."""
    transport = context.transport
    for request in requests:
        (tensor,) = request.inputs
        splits = request.payload
        everyones = yield from bruck.allgather(np.asarray(splits, np.int64), transport)
        received = [int(n) for n in everyones[:, transport.rank]]
        row = math.prod(tensor.shape[1:])
        result = context.empty(tensor, (sum(received), *tensor.shape[1:]))
        sent_counts, received_counts = [n * row for n in splits], [n * row for n in received]
        with context.timeline.phase([request], "ALLTOALL"):
            flat, came = (yield from down(tensor, context)), room(result)
            yield from pairwise.alltoall(flat, came, transport, sent_counts, received_counts)
            up(came, result, context)
        request.outputs, request.payload = [result], received
        request.complete()


def _reducescatter(requests: Sequence[Request], context: Context) -> Steps[None]:
    """The ring's first half; rank r gets the r-th part of the rows."""
    transport = context.transport
    for request in requests:
        request.outputs = outputs = []
        for tensor in request.inputs:
            reduction = context.reduction(request, tensor.element)
            row = math.prod(tensor.shape[1:])
            bounds = chunk_bounds(tensor.shape[0], transport.size)
            counts = [(high - low) * row for low, high in itertools.pairwise(bounds)]
            rows = bounds[transport.rank + 1] - bounds[transport.rank]
            part = context.empty(tensor, (rows, *tensor.shape[1:]))
            with context.timeline.phase([request], "REDUCESCATTER"):
                flat, mine = (yield from down(tensor, context)), room(part)
                work = flat if tensor.on_gpu else flat.copy()
                low, high = yield from ring.scatter_reduce(
                    work, transport, reduction, context.routes.segment_bytes, counts, transport.rank
                )
                mine[...] = work[low:high]
                up(mine, part, context)
            outputs.append(part)
        request.complete()


def _broadcast_object(requests: Sequence[Request], context: Context) -> Steps[None]:
    """`payload` is the root's pickled object, and becomes it on every rank."""
    transport = context.transport
    for request in requests:
        root = context.place("broadcast_object", request.description.detail("root_rank"))
        lengths = yield from bruck.allgather(np.array([request.payload.size], np.int64), transport)
        if transport.rank != root:
            request.payload = np.empty(int(lengths[root, 0]), np.uint8)
        yield from tree.broadcast(request.payload, transport, root)
        request.complete()


def _nothing(requests: Iterable[Request], context: Context) -> Steps[None]:
    """A barrier and the like: that all ranks agreed is all there is to do."""
    for request in requests:
        request.complete()
    yield from ()


OPERATIONS: dict[str, Callable[[list[Request], Context], Steps[None]]] = {
    "allreduce": allreduce,
    "adasum": _adasum,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "broadcast_object": _broadcast_object,
    "allgather_object": _allgather,
    "barrier": _nothing,
    "join": _nothing,
}
FUSED = ("allreduce", "broadcast")
