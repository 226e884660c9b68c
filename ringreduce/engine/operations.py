"""What is run once all ranks of a process set agree: fusion and the collectives. Generators, driven by the engine.

Everything here runs alike on all ranks: the order and the plan depend on what was agreed on only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringreduce import fusion
from ringreduce.buffers import Buffer
from ringreduce.collectives import adasum, bruck, pairwise, ring, tree
from ringreduce.engine.request import Request
from ringreduce.engine.timeline import Timeline
from ringreduce.errors import InputError
from ringreduce.ops import Adasum, ReduceOp, Reduction
from ringreduce.partition import chunk_bounds
from ringreduce.settings import Settings
from ringreduce.transport.base import Steps, Transport


@dataclasses.dataclass
class Context:
    """What operations of one process set need."""

    transport: Transport
    members: tuple[int, ...]
    """Ranks of the world, by rank in the set."""
    settings: Settings
    memory: fusion.Memory
    timeline: Timeline
    divisor: int
    """What an Average is divided by: the set's size, or its live ranks."""

    def place(self, kind: str, root_rank: Any) -> int:
        """The rank in the set of a rank of the world."""
        if not isinstance(root_rank, int) or root_rank not in self.members:
            what = f"a rank from 0 to {len(self.members) - 1}"
            if self.members != tuple(range(len(self.members))):
                what = f"a rank of the process set, {', '.join(map(str, self.members))}"
            raise InputError(f"{kind}: root_rank={root_rank!r}; expected {what}")
        return self.members.index(root_rank)


def run(requests: Sequence[Request], context: Context) -> Steps[None]:
    """Run what was agreed on; completes each request as soon as its tensors are finished."""
    batches: dict[Any, list[Request]] = {}
    for request in requests:
        kind = request.description.kind
        apart = kind not in FUSED or (kind == "allreduce" and request.description.detail("op") == Adasum.value)
        # one batch for all that may travel together: a tensor of another kind does not end it
        batches.setdefault((kind, request.key if apart else request.description.details), []).append(request)
    for (kind, _), batch in batches.items():
        try:
            yield from OPERATIONS[kind](batch, context)
        except InputError as exc:  # all ranks find the same wrong
            for request in batch:
                request.fail(exc)


def _settle(request: Request) -> None:
    request.missing_pieces -= 1
    if request.missing_pieces == 0:
        request.complete()


def _fused(
    requests: Sequence[Request],
    context: Context,
    kind: Callable[[Buffer], Any],
    capacity: Callable[[Buffer], int],
    work: Callable[[fusion.Slot, list[Buffer], list[Buffer], list[Request]], Steps[None]],
) -> Steps[None]:
    """Plan and run all tensors of the requests, one `kind` of tensors after the other."""
    tensors: dict[Any, list[tuple[Request, Buffer, Buffer]]] = {}
    for request in requests:
        request.missing_pieces = 1  # for the planning itself: not complete before its end
        for source, target in zip(request.inputs, request.outputs, strict=True):
            tensors.setdefault(kind(source), []).append((request, source, target))
    planned = []
    for members in tensors.values():
        owners, inputs, outputs = (list(column) for column in zip(*members, strict=True))
        for slot in fusion.plan([each.count for each in inputs], capacity(inputs[0])):
            for piece in slot.pieces:
                owners[piece.tensor].missing_pieces += 1
            planned.append((slot, inputs, outputs, owners))
    for request in requests:
        _settle(request)
    for slot, inputs, outputs, owners in planned:
        yield from work(slot, inputs, outputs, owners)
        for piece in slot.pieces:
            _settle(owners[piece.tensor])


def _kind_of(tensor: Buffer) -> tuple[str, str]:
    return tensor.element.name, tensor.device.partition(":")[0]


def _allreduce(requests: Sequence[Request], context: Context) -> Steps[None]:
    first = requests[0].description
    op = ReduceOp(first.detail("op"))
    if op is Adasum:
        yield from _adasum(requests, context)
        return
    scales = first.detail("prescale_factor"), first.detail("postscale_factor")

    def reduction(tensor: Buffer) -> Reduction:
        return Reduction(op, tensor.element, context.divisor, *scales)

    def capacity(tensor: Buffer) -> int:
        kind = reduction(tensor)
        finished = 0 if kind.in_place else tensor.element.itemsize
        return max(1, context.settings.fusion_slot_bytes // (kind.sum_type.itemsize + finished))

    def work(slot: fusion.Slot, inputs: list[Buffer], outputs: list[Buffer], owners: list[Request]) -> Steps[None]:
        yield from _reduce_slot(slot, inputs, outputs, owners, reduction(inputs[0]), context)

    yield from _fused(requests, context, _kind_of, capacity, work)


def _reduce_slot(
    slot: fusion.Slot,
    inputs: list[Buffer],
    outputs: list[Buffer],
    owners: list[Request],
    reduction: Reduction,
    context: Context,
) -> Steps[None]:
    """Pack, reduce, unpack; a piece that is alone is reduced in the output's own memory when its type allows."""
    like, timeline = inputs[0], context.timeline
    names = [owners[piece.tensor] for piece in slot.pieces]
    scratch_block = context.memory.take(like)
    scratch = _view(scratch_block, reduction.sum_type)
    segment_bytes = min(context.settings.ring_segment_bytes, scratch.nbytes // ring.RECEIVES_AHEAD)
    if len(slot.pieces) == 1 and reduction.in_place:
        number, low, high = slot.pieces[0]
        flat = outputs[number].flat[low:high]
        if outputs[number] is not inputs[number]:
            flat[...] = inputs[number].flat[low:high]
        reduction.prescaled(flat)
        with timeline.phase(names, "ALLREDUCE"):
            yield from ring.allreduce(flat, context.transport, reduction, segment_bytes, ring.Workspace(flat, scratch))
    else:
        block = context.memory.take(like)
        partial = _view(block, reduction.sum_type)[: slot.length]
        with timeline.phase(names, "MEMCPY_IN_FUSION_BUFFER"):
            fusion.pack(slot, inputs, partial, widen=None if reduction.in_place else reduction.widen)
        reduction.prescaled(partial)
        finished = partial
        if not reduction.in_place:
            finished = _view(block[partial.nbytes :], like.element.storage)[: slot.length]
        with timeline.phase(names, "ALLREDUCE"):
            yield from ring.allreduce(
                finished, context.transport, reduction, segment_bytes, ring.Workspace(partial, scratch)
            )
        with timeline.phase(names, "MEMCPY_OUT_FUSION_BUFFER"):
            fusion.unpack(slot, finished, outputs)
        context.memory.give(block, like)
    context.memory.give(scratch_block, like)


def _view(block: Any, dtype: np.dtype[Any]) -> Any:
    """A block of bytes as elements of `dtype`."""
    return block[: block.size // dtype.itemsize * dtype.itemsize].view(dtype)


def _adasum(requests: Sequence[Request], context: Context) -> Steps[None]:
    """Each tensor on its own: how much two gradients have in common is a matter of the layer."""
    size = len(context.members)
    if size & (size - 1):
        raise InputError(f"op=Adasum: {size} ranks; expected a power of two, such as 2, 4 or 8")
    for request in requests:
        for source, target in zip(request.inputs, request.outputs, strict=True):
            details = request.description
            scales = details.detail("prescale_factor"), details.detail("postscale_factor")
            reduction = Reduction(Adasum, source.element, size, *scales)
            if target is not source:
                target.flat[...] = source.flat
            partial = reduction.start(target.flat)
            with context.timeline.phase([request], "ADASUM"):
                yield from adasum.allreduce(partial, context.transport)
            reduction.finish(partial, target.flat)
        request.complete()


def _broadcast(requests: Sequence[Request], context: Context) -> Steps[None]:
    root = context.place("broadcast", requests[0].description.detail("root_rank"))

    def capacity(tensor: Buffer) -> int:
        return max(1, context.settings.fusion_slot_bytes // tensor.element.itemsize)

    def work(slot: fusion.Slot, inputs: list[Buffer], outputs: list[Buffer], owners: list[Request]) -> Steps[None]:
        like = inputs[0]
        names = [owners[piece.tensor] for piece in slot.pieces]
        if len(slot.pieces) == 1:
            number, low, high = slot.pieces[0]
            flat = outputs[number].flat[low:high]
            if outputs[number] is not inputs[number]:
                flat[...] = inputs[number].flat[low:high]
            with context.timeline.phase(names, "BROADCAST"):
                yield from tree.broadcast(flat, context.transport, root)
            return
        block = context.memory.take(like)
        packed = _view(block, like.element.storage)[: slot.length]
        with context.timeline.phase(names, "MEMCPY_IN_FUSION_BUFFER"):
            fusion.pack(slot, inputs, packed)
        with context.timeline.phase(names, "BROADCAST"):
            yield from tree.broadcast(packed, context.transport, root)
        with context.timeline.phase(names, "MEMCPY_OUT_FUSION_BUFFER"):
            fusion.unpack(slot, packed, outputs)
        context.memory.give(block, like)

    yield from _fused(requests, context, _kind_of, capacity, work)


def _allgather(requests: Sequence[Request], context: Context) -> Steps[None]:
    """Rows may differ per rank: their numbers travel first, those of all tensors of a group together."""
    transport, rank = context.transport, context.transport.rank
    for request in requests:
        mine = np.array([tensor.shape[0] for tensor in request.inputs], np.int64)
        rows = yield from bruck.allgather(mine, transport)
        request.outputs = []
        for number, tensor in enumerate(request.inputs):
            counts = [int(n) * math.prod(tensor.shape[1:]) for n in rows[:, number]]
            gathered = tensor.empty((int(rows[:, number].sum()), *tensor.shape[1:]))
            start = sum(counts[:rank])
            gathered.flat[start : start + tensor.count] = tensor.flat
            with context.timeline.phase([request], "ALLGATHER"):
                yield from ring.allgather(gathered.flat, transport, counts, rank, context.settings.ring_segment_bytes)
            request.outputs.append(gathered)
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
        result = tensor.empty((sum(received), *tensor.shape[1:]))
        with context.timeline.phase([request], "ALLTOALL"):
            yield from pairwise.alltoall(
                tensor.flat, result.flat, transport, [n * row for n in splits], [n * row for n in received]
            )
        request.outputs, request.payload = [result], received
        request.complete()


def _reducescatter(requests: Sequence[Request], context: Context) -> Steps[None]:
    """The ring's first half; rank r gets the r-th part of the rows."""
    transport = context.transport
    for request in requests:
        details = request.description
        request.outputs = []
        for tensor in request.inputs:
            reduction = Reduction(
                ReduceOp(details.detail("op")),
                tensor.element,
                context.divisor,
                details.detail("prescale_factor"),
                details.detail("postscale_factor"),
            )
            row = math.prod(tensor.shape[1:])
            bounds = chunk_bounds(tensor.shape[0], transport.size)
            counts = [(high - low) * row for low, high in itertools.pairwise(bounds)]
            work = tensor.copy()
            with context.timeline.phase([request], "REDUCESCATTER"):
                low, high = yield from ring.scatter_reduce(
                    work.flat, transport, reduction, context.settings.ring_segment_bytes, counts, transport.rank
                )
            rows = bounds[transport.rank + 1] - bounds[transport.rank]
            part = tensor.empty((rows, *tensor.shape[1:]))
            part.flat[...] = work.flat[low:high]
            request.outputs.append(part)
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


def _allgather_object(requests: Sequence[Request], context: Context) -> Steps[None]:
    """`payload` is this rank's pickled object, and becomes the list of all ranks'."""
    transport, rank = context.transport, context.transport.rank
    for request in requests:
        lengths = yield from bruck.allgather(np.array([request.payload.size], np.int64), transport)
        counts = [int(n) for n in lengths[:, 0]]
        ends = np.cumsum(counts)
        gathered = np.empty(int(ends[-1]), np.uint8)
        gathered[ends[rank] - counts[rank] : ends[rank]] = request.payload
        yield from ring.allgather(gathered, transport, counts, rank, context.settings.ring_segment_bytes)
        request.payload = [gathered[end - n : end] for end, n in zip(ends, counts, strict=True)]
        request.complete()


def _nothing(requests: Iterable[Request], context: Context) -> Steps[None]:
    """A barrier and the like: that all ranks agreed is all there is to do."""
    for request in requests:
        request.complete()
    yield from ()


OPERATIONS: dict[str, Callable[[list[Request], Context], Steps[None]]] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "broadcast_object": _broadcast_object,
    "allgather_object": _allgather_object,
    "barrier": _nothing,
    "add_process_set": _nothing,
    "remove_process_set": _nothing,
}
FUSED = ("allreduce", "broadcast")
