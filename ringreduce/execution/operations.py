"""Runs the operations that are ready on all ranks of a process set, as generators driven by the engine.

Order and fusion depend on the response only, so they are equal on all ranks.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ringreduce.collectives import adasum, pairwise, shared_halves, tree
from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.partition import bounds_of, by_chunk, chunk_bounds, cut_together
from ringreduce.errors import InputError
from ringreduce.execution import halves
from ringreduce.execution.allreduce import ADASUM, allreduce
from ringreduce.execution.batch import Batch, batches
from ringreduce.execution.context import Context, Operation
from ringreduce.execution.halves import Arrays
from ringreduce.execution.in_slot import Gets, InSlot, in_slot
from ringreduce.execution.packing import buckets_of, carry
from ringreduce.execution.submission import Submission
from ringreduce.transport.base import Steps
from ringreduce.transport.window import PACKED, Region


def run(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Run ready submissions; completes each as soon as its tensors are finished."""
    batches: dict[Any, list[Submission]] = {}
    last: tuple[str, Any] | None = None
    batch: list[Submission] = []
    for submission in submissions:
        if submission.ready:
            context.gpu.begin(submission)
        kind, _, _, details, _ = submission.signature
        if (kind, details) != last:
            if kind == "allreduce" and ADASUM in details:
                kind = "adasum"
            # fuse all that can be fused, also when other operations are submitted in between
            last = (kind, details) if kind in FUSED else None
            batch = batches.setdefault(last or (kind, submission.key), [])
        batch.append(submission)
    for (kind, _), batch in batches.items():
        for submission in batch:
            if submission.recorder is not None:
                submission.begun_s = time.monotonic()
        try:
            yield from (OPERATIONS.get(kind) or context.operations[kind])(batch, context)
        except InputError as exc:  # raised on all ranks
            for submission in batch:
                submission.fail(exc)
        if context.completions.settled:
            context.completions.flush()  # the next operation, such as a barrier, may complete at once


def _adasum(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Reduce each tensor separately, since Adasum compares the gradients of each layer."""
    size = len(context.members)
    if size & (size - 1):
        raise InputError(f"op=Adasum: {size} ranks; expected a power of two, such as 2, 4 or 8")
    for submission in submissions:
        for source, target in zip(submission.inputs, submission.outputs, strict=True):
            reduction = submission.reduction(source.element)
            flat = yield from context.gpu.down(source)
            if not target.on_gpu and target is not source:
                target.flat[...], flat = flat, target.flat
            sums = reduction.start(flat)
            with context.timeline.phase([submission], "ADASUM"):
                yield from adasum.allreduce(sums, context.transport)
            reduction.finish(sums, flat)
            context.gpu.up(flat, target)
        submission.complete()


def _broadcast(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    root = context.set_rank("broadcast", submissions[0].signature.detail("root_rank"))

    def by_messages(flat: Any, channel: int = 0) -> Steps[None]:
        yield from tree.broadcast(flat, context.algorithms.channels[channel], root)

    found = batches(submissions)
    on_gpu = [context.gpu.through_host(each, by_messages) for each in found if each.on_gpu]
    on_host = [each for each in found if not each.on_gpu]
    region = context.algorithms.shared_region
    planned = [(each, buckets_of(each, context, each.inputs[0].element.itemsize)) for each in on_host if region is None]
    for batch, buckets in planned:
        batch.expect(buckets)
    for each in on_gpu:
        yield from each
    if region is not None:
        for batch in on_host:
            yield from _broadcast_in_window(batch, root, region, context)
    context.completions.settle(submissions)
    for batch, buckets in planned:
        for bucket in buckets:
            yield from carry(batch, bucket, lambda flat, _: by_messages(flat), "BROADCAST", context)


def _broadcast_in_window(batch: Batch, root: int, region: Region, context: Context) -> Steps[None]:
    if region.rank == root:
        for source, target in zip(batch.inputs, batch.outputs, strict=True):
            if target is not source:
                target.flat[...] = source.flat
    with context.timeline.phase(batch.owners, "BROADCAST"):
        yield from shared_halves.broadcast([each.flat for each in batch.outputs], root, region)


def _allgather(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Gather the ranks' row counts first, of all tensors of a group together; with the rows, where there is room."""
    region = context.algorithms.shared_region
    for submission in submissions:
        if region is not None and len(submission.inputs) == 1 and not submission.inputs[0].on_gpu:
            (source,) = submission.inputs
            fits = InSlot(Gets.BY_ROWS, region, source.shape[0])
            if (yield from through_slot(submission, fits, context)):
                continue
        else:
            mine = np.array([tensor.shape[0] for tensor in submission.inputs], np.int64)
            submission.payload = yield from halves.integers_of_all(mine, context)
        yield from gather_rows(submission, context)


def gather_rows(submission: Submission, context: Context) -> Steps[None]:
    """An allgather whose payload has every rank's rows of each tensor."""

    def move(sources: Arrays, targets: Arrays) -> Steps[None]:
        yield from halves.allgather(sources, by_chunk(targets, bounds, context.transport.size), context, targets)

    rows = submission.payload.T.tolist()
    make_outputs(submission, [sum(each) for each in rows], context)
    bounds = _bounds(submission, rows)
    yield from halves.on_host([submission], "ALLGATHER", move, context)


def through_slot(submission: Submission, fits: InSlot, context: Context, is_packed: bool = False) -> Steps[bool]:
    """Run it in one slot; False when the rows of all ranks, now its payload, do not fit there."""
    region = fits.region
    if not is_packed:
        fits.pack([each.flat for each in submission.inputs])
        region.publish(PACKED, region.sequence)
    if not region.arrived(PACKED, region.sequence):
        yield region.arrival(PACKED, region.sequence)
    rows = fits.rows
    if fits.gets is Gets.BY_ROWS:
        all_rows, nbytes = fits.rows_of_all(), submission.inputs[0].element.itemsize
        submission.payload, rows = np.array(all_rows, np.int64)[:, np.newaxis], sum(all_rows)
        if max(all_rows) * math.prod(submission.inputs[0].shape[1:]) * nbytes > region.slot_bytes:
            region.sequence += 1
            return False
    if rows is not None:
        make_outputs(submission, [rows], context)
    with context.timeline.phase([submission], submission.signature.kind.removesuffix("_object").upper()):
        yield from fits.finish([each.flat for each in submission.outputs])
    submission.complete()
    return True


def alltoall(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """`payload` is this rank's splits, and becomes the number of rows received from each rank."""

    def move(sources: Arrays, targets: Arrays, sent: list[list[int]], received: list[list[int]]) -> Steps[None]:
        outgoing = [part for (part,) in by_chunk(sources, sent, size)]  # of a scatter only the root's rows
        incoming = [part for (part,) in by_chunk(targets, received, size)]
        yield from pairwise.alltoall(outgoing, incoming, context.transport)

    size = context.transport.size
    for submission in submissions:
        gathered = yield from halves.integers_of_all(np.asarray(submission.payload, np.int64), context)
        sent, received = submission.payload, gathered[:, context.transport.rank].tolist()
        make_outputs(submission, [sum(received)], context)
        both = {"sent": _bounds(submission, [sent]), "received": _bounds(submission, [received])}
        submission.payload = received
        yield from halves.on_host([submission], "ALLTOALL", partial(move, **both), context)


def _reducescatter(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """The first half of an all-reduce; rank r gets the r-th part of the rows."""

    def move(sources: Arrays, targets: Arrays, bounds: list[list[int]], of: list[Reduction]) -> Steps[None]:
        yield from halves.reduce_scatter(by_chunk(sources, bounds, size), targets, of, context)

    rank, size = context.transport.rank, context.transport.size
    for submission in submissions:
        fits = in_slot(submission, context)
        if fits is not None:
            yield from through_slot(submission, fits, context)
            continue
        ends = [chunk_bounds(tensor.shape[0], size) for tensor in submission.inputs]
        rows = [[high - low for low, high in itertools.pairwise(each)] for each in ends]
        make_outputs(submission, [each[rank] for each in rows], context)
        reductions = [submission.reduction(each.element) for each in submission.inputs]
        own = partial(move, bounds=_bounds(submission, rows), of=reductions)
        yield from halves.on_host([submission], "REDUCESCATTER", own, context)


def _reduce_shards(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Of all elements of all inputs, one after the other, rank r gets the r-th part, reduced, in its only output.

    Through the window all submissions go together: each alone would have to wait for its last slot.
    """

    def move(sources: Arrays, targets: Arrays, ends: list[list[int]], of: list[Reduction]) -> Steps[None]:
        own = zip(targets, ends, strict=True)
        pieces = [whole[low:high] for whole, at in own for low, high in itertools.pairwise(at)]
        yield from halves.reduce_scatter(by_chunk(sources, [*itertools.chain(*bounds)], size), pieces, of, context)

    rank, size = context.transport.rank, context.transport.size
    for group in [submissions] if context.algorithms.shared_region is not None else [[each] for each in submissions]:
        bounds = [cut_together([array.count for array in each.inputs], size) for each in group]
        ends = [bounds_of([at[rank + 1] - at[rank] for at in each]) for each in bounds]
        of = [each.reduction(array.element) for each in group for array in each.inputs]
        yield from halves.on_host(group, "REDUCESCATTER", partial(move, ends=ends, of=of), context)


def _gather_shards(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Copy the part of all elements that `_reduce_shards` gives to a rank from that rank's arrays into all others'."""

    def move(sources: Arrays, targets: Arrays, bounds: list[list[int]]) -> Steps[None]:
        own = by_chunk(sources, bounds, size)[context.transport.rank]
        yield from halves.allgather(own, by_chunk(targets, bounds, size), context)

    size = context.transport.size
    for submission in submissions:
        bounds = cut_together([each.count for each in submission.inputs], size)
        yield from halves.on_host([submission], "ALLGATHER", partial(move, bounds=bounds), context)


def make_outputs(submission: Submission, rows: Sequence[int], context: Context) -> None:
    """Make outputs like the inputs, with this many rows each; keep the caller's own if they have these shapes."""
    shapes = [(own, *tensor.shape[1:]) for tensor, own in zip(submission.inputs, rows, strict=True)]
    if [each.shape for each in submission.outputs] != shapes:
        both = zip(submission.inputs, shapes, strict=True)
        submission.outputs = [context.empty(tensor, shape) for tensor, shape in both]


def _bounds(submission: Submission, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Where the elements of each rank begin and end, by input; rows[k]: of each rank, of input k."""
    both = zip(submission.inputs, rows, strict=True)
    return [bounds_of([n * math.prod(tensor.shape[1:]) for n in each]) for tensor, each in both]


def _broadcast_object(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """`payload` becomes the root's pickled object on every rank."""
    transport = context.transport
    for submission in submissions:
        root = context.set_rank("broadcast_object", submission.signature.detail("root_rank"))
        lengths = yield from halves.integers_of_all(np.array([submission.payload.size], np.int64), context)
        if transport.rank != root:
            submission.payload = np.empty(int(lengths[root, 0]), np.uint8)
        if context.algorithms.shared_region is not None:
            yield from shared_halves.broadcast([submission.payload], root, context.algorithms.shared_region)
        else:
            yield from tree.broadcast(submission.payload, transport, root)
        submission.complete()


def _nothing(submissions: Iterable[Submission], context: Context) -> Steps[None]:
    """A barrier or join: complete when it is ready on all ranks."""
    for submission in submissions:
        submission.complete()
    yield from ()


OPERATIONS: dict[str, Operation] = {
    "allreduce": allreduce,
    "adasum": _adasum,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": alltoall,
    "reducescatter": _reducescatter,
    "reduce_shards": _reduce_shards,
    "gather_shards": _gather_shards,
    "broadcast_object": _broadcast_object,
    "allgather_object": _allgather,
    "barrier": _nothing,
    "join": _nothing,
}
FUSED = ("allreduce", "broadcast", "reduce_shards")
