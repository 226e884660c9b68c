"""Runs the operations that are ready on all ranks of a process set, as generators driven by the engine.

Order and fusion depend on the response only, so they are equal on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import adasum, bruck, direct, pairwise, ring, shared_halves, tree
from ringreduce.cost_model import BUCKETS_IN_FLIGHT
from ringreduce.errors import InputError
from ringreduce.execution.allreduce import ADASUM, allreduce
from ringreduce.execution.batch import Batch, batches, carry, plan
from ringreduce.execution.context import Context, Operation
from ringreduce.execution.submission import Submission
from ringreduce.gpu.allreduce import GpuBatch
from ringreduce.gpu.through_host import down, room, up
from ringreduce.partition import bounds_of, by_chunk, chunk_bounds
from ringreduce.transport.base import Steps
from ringreduce.transport.window import Region


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
        try:
            yield from (OPERATIONS.get(kind) or context.operations[kind])(batch, context)
        except InputError as exc:  # raised on all ranks
            for submission in batch:
                submission.fail(exc)
        context.completions.flush()  # the next operation, such as a barrier, may complete at once


def _adasum(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Each tensor separately, since Adasum compares the gradients of each layer."""
    size = len(context.members)
    if size & (size - 1):
        raise InputError(f"op=Adasum: {size} ranks; expected a power of two, such as 2, 4 or 8")
    for submission in submissions:
        for source, target in zip(submission.inputs, submission.outputs, strict=True):
            reduction = submission.reduction(source.element)
            flat = yield from down(source, context)
            if not target.on_gpu and target is not source:
                target.flat[...], flat = flat, target.flat
            partial = reduction.start(flat)
            with context.timeline.phase([submission], "ADASUM"):
                yield from adasum.allreduce(partial, context.transport)
            reduction.finish(partial, flat)
            up(flat, target, context)
        submission.complete()


def _broadcast(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    root = context.set_rank("broadcast", submissions[0].signature.detail("root_rank"))

    def by_messages(flat: Any, channel: int = 0) -> Steps[None]:
        yield from tree.broadcast(flat, context.algorithms.channels[channel], root)

    found = batches(submissions)
    on_gpu = [GpuBatch(each, context.settings.fusion_slot_bytes, context) for each in found if each.on_gpu]
    on_host = [each for each in found if not each.on_gpu]
    region = context.algorithms.shared_region
    planned = [(each, plan(each, context, each.inputs[0].element.itemsize)) for each in on_host if region is None]
    for batch, buckets in planned:
        batch.expect(buckets)
    for each in on_gpu:
        yield from each.through_host(by_messages, BUCKETS_IN_FLIGHT)
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


def integers_of_all(values: Any, context: Context) -> Steps[Any]:
    """Every rank's integers, by rank; as many on each."""
    if context.algorithms.shared_region is None:
        return (yield from bruck.allgather(values, context.transport))
    found = np.empty((context.transport.size, values.size), np.int64)
    yield from shared_halves.allgather([values], [[each] for each in found], context.algorithms.shared_region)
    return found


def _allgather(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Gathers the ranks' row counts first, of all tensors of a group together."""
    for submission in submissions:
        mine = np.array([tensor.shape[0] for tensor in submission.inputs], np.int64)
        submission.payload = everyones = yield from integers_of_all(mine, context)
        rows = everyones.T.tolist()
        yield from _moved(submission, [sum(each) for each in rows], rows, "ALLGATHER", _gathered, context)


Move = Callable[[Submission, list[Any], list[Any], list[list[int]], Context], Steps[None]]
"""From sources to targets; bounds[k][r]: where rank r's elements begin in the longer of the two, of tensor k."""


def _moved(
    submission: Submission,
    results: Sequence[int],
    rows: Sequence[Sequence[int]],
    phase: str,
    move: Move,
    context: Context,
) -> Steps[None]:
    """Make the outputs, of results[k] rows, and complete.  rows[k]: of each rank, of tensor k."""
    sources, bounds = [], []
    submission.outputs = outputs = []
    for tensor, own, everyones in zip(submission.inputs, results, rows, strict=True):
        outputs.append(context.empty(tensor, (own, *tensor.shape[1:])))
        sources.append((yield from down(tensor, context)))
        bounds.append(bounds_of([n * math.prod(tensor.shape[1:]) for n in everyones]))
    targets = [room(each) for each in outputs]
    with context.timeline.phase([submission], phase):
        yield from move(submission, sources, targets, bounds, context)
    for target, output in zip(targets, outputs, strict=True):
        up(target, output, context)
    submission.complete()


def _gathered(
    _: Submission, sources: list[Any], targets: list[Any], bounds: list[list[int]], context: Context
) -> Steps[None]:
    """See `Move`."""
    transport, rank = context.transport, context.transport.rank
    if context.algorithms.shared_region is not None:
        yield from shared_halves.allgather(
            sources, by_chunk(targets, bounds, transport.size), context.algorithms.shared_region
        )
        return
    for source, target, at in zip(sources, targets, bounds, strict=True):
        target[at[rank] : at[rank + 1]] = source
        counts = [high - low for low, high in itertools.pairwise(at)]
        yield from ring.allgather(target, transport, counts, rank, context.algorithms.segment_bytes)


def alltoall(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """`payload` is this rank's splits, and becomes the number of rows received from each rank."""
    transport = context.transport
    for submission in submissions:
        (tensor,) = submission.inputs
        splits = submission.payload
        everyones = yield from integers_of_all(np.asarray(splits, np.int64), context)
        received = [int(n) for n in everyones[:, transport.rank]]
        row = math.prod(tensor.shape[1:])
        result = context.empty(tensor, (sum(received), *tensor.shape[1:]))
        sent_counts, received_counts = [n * row for n in splits], [n * row for n in received]
        with context.timeline.phase([submission], "ALLTOALL"):
            flat, incoming = (yield from down(tensor, context)), room(result)
            yield from pairwise.alltoall(flat, incoming, transport, sent_counts, received_counts)
            up(incoming, result, context)
        submission.outputs, submission.payload = [result], received
        submission.complete()


def _reducescatter(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """The first half of an all-reduce; rank r gets the r-th part of the rows."""
    rank, size = context.transport.rank, context.transport.size
    for submission in submissions:
        bounds = [chunk_bounds(tensor.shape[0], size) for tensor in submission.inputs]
        rows = [[high - low for low, high in itertools.pairwise(each)] for each in bounds]
        yield from _moved(submission, [each[rank] for each in rows], rows, "REDUCESCATTER", _scattered, context)


def _scattered(
    submission: Submission, sources: list[Any], targets: list[Any], bounds: list[list[int]], context: Context
) -> Steps[None]:
    """See `Move`."""
    reductions = [submission.reduction(each.element) for each in submission.inputs]
    transport, rank = context.transport, context.transport.rank
    if context.algorithms.shared_region is not None:
        for reduction in dict.fromkeys(reductions):
            mine = [k for k, each in enumerate(reductions) if each == reduction]
            parts = by_chunk([sources[k] for k in mine], [bounds[k] for k in mine], transport.size)
            yield from shared_halves.reduce_scatter(
                parts, [targets[k] for k in mine], context.algorithms.shared_region, reduction
            )
        return
    for source, target, at, reduction in zip(sources, targets, bounds, reductions, strict=True):
        counts = [high - low for low, high in itertools.pairwise(at)]
        work, segment_bytes = source.copy(), context.algorithms.segment_bytes
        if context.settings.deterministic:
            yield from direct.scatter_reduce(work, transport, reduction, segment_bytes, counts)
        else:
            yield from ring.scatter_reduce(work, transport, reduction, segment_bytes, counts, rank)
        target[...] = work[at[rank] : at[rank + 1]]


def _broadcast_object(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """`payload` becomes the root's pickled object on every rank."""
    transport = context.transport
    for submission in submissions:
        root = context.set_rank("broadcast_object", submission.signature.detail("root_rank"))
        lengths = yield from integers_of_all(np.array([submission.payload.size], np.int64), context)
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
    "broadcast_object": _broadcast_object,
    "allgather_object": _allgather,
    "barrier": _nothing,
    "join": _nothing,
}
FUSED = ("allreduce", "broadcast")
