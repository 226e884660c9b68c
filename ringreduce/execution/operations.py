"""Runs the operations that are ready on all ranks of a process set, as generators driven by the engine.

Order and fusion depend on the response only, so they are equal on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import adasum, bruck, pairwise, ring, tree
from ringreduce.errors import InputError
from ringreduce.execution.allreduce import allreduce
from ringreduce.execution.batch import batches, carry, plan
from ringreduce.execution.context import Context, Operation
from ringreduce.execution.submission import Submission
from ringreduce.gpu.through_host import GpuBroadcast, down, room, up
from ringreduce.ops import Adasum
from ringreduce.partition import chunk_bounds
from ringreduce.transport.base import Steps


def run(submissions: Sequence[Submission], context: Context, divisor: int) -> Steps[None]:
    """Run ready submissions; completes each as soon as its tensors are finished.  divisor: see Context."""
    context.divisor = divisor
    batches: dict[Any, list[Submission]] = {}
    for submission in submissions:
        if submission.ready:
            context.gpu.begin(submission)
        kind = submission.signature.kind
        if kind == "allreduce" and submission.signature.detail("op") == Adasum.value:
            kind = "adasum"
        # fuse all that can be fused, also when other operations are submitted in between
        key = kind, submission.signature.details if kind in FUSED else submission.key
        batches.setdefault(key, []).append(submission)
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
            reduction = context.reduction(submission, source.element)
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

    def collective(flat: Any, _: Any) -> Steps[None]:
        yield from tree.broadcast(flat, context.transport, root)

    found = batches(submissions)
    on_gpu = [GpuBroadcast(each, root, context) for each in found if each.on_gpu]
    planned = [(batch, plan(batch, context, batch.inputs[0].element.itemsize)) for batch in found if not batch.on_gpu]
    for batch, buckets in planned:
        batch.expect(buckets)
    context.completions.settle(submissions)
    for each in on_gpu:
        yield from each.run()
    for batch, buckets in planned:
        for bucket in buckets:
            yield from carry(batch, bucket, collective, "BROADCAST", context)


def _allgather(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Gathers the ranks' row counts first, of all tensors of a group together."""
    transport, rank = context.transport, context.transport.rank
    for submission in submissions:
        mine = np.array([tensor.shape[0] for tensor in submission.inputs], np.int64)
        rows = yield from bruck.allgather(mine, transport)
        submission.outputs = outputs = []
        for number, tensor in enumerate(submission.inputs):
            counts = [int(n) * math.prod(tensor.shape[1:]) for n in rows[:, number]]
            gathered = context.empty(tensor, (int(rows[:, number].sum()), *tensor.shape[1:]))
            with context.timeline.phase([submission], "ALLGATHER"):
                flat, start = room(gathered), sum(counts[:rank])
                flat[start : start + tensor.count] = yield from down(tensor, context)
                yield from ring.allgather(flat, transport, counts, rank, context.algorithms.segment_bytes)
                up(flat, gathered, context)
            outputs.append(gathered)
        submission.payload = rows
        submission.complete()


def _alltoall(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """`payload` is this rank's splits, and becomes the number of rows received from each rank."""
    transport = context.transport
    for submission in submissions:
        (tensor,) = submission.inputs
        splits = submission.payload
        everyones = yield from bruck.allgather(np.asarray(splits, np.int64), transport)
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
    """The first half of the ring all-reduce; rank r gets the r-th part of the rows."""
    transport = context.transport
    for submission in submissions:
        submission.outputs = outputs = []
        for tensor in submission.inputs:
            reduction = context.reduction(submission, tensor.element)
            row = math.prod(tensor.shape[1:])
            bounds = chunk_bounds(tensor.shape[0], transport.size)
            counts = [(high - low) * row for low, high in itertools.pairwise(bounds)]
            rows = bounds[transport.rank + 1] - bounds[transport.rank]
            part = context.empty(tensor, (rows, *tensor.shape[1:]))
            with context.timeline.phase([submission], "REDUCESCATTER"):
                flat, mine = (yield from down(tensor, context)), room(part)
                work = flat if tensor.on_gpu else flat.copy()
                low, high = yield from ring.scatter_reduce(
                    work, transport, reduction, context.algorithms.segment_bytes, counts, transport.rank
                )
                mine[...] = work[low:high]
                up(mine, part, context)
            outputs.append(part)
        submission.complete()


def _broadcast_object(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """`payload` becomes the root's pickled object on every rank."""
    transport = context.transport
    for submission in submissions:
        root = context.set_rank("broadcast_object", submission.signature.detail("root_rank"))
        lengths = yield from bruck.allgather(np.array([submission.payload.size], np.int64), transport)
        if transport.rank != root:
            submission.payload = np.empty(int(lengths[root, 0]), np.uint8)
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
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "broadcast_object": _broadcast_object,
    "allgather_object": _allgather,
    "barrier": _nothing,
    "join": _nothing,
}
FUSED = ("allreduce", "broadcast")
