"""Operations whose results go into arrays that the caller gives, as torch.distributed's do.

Where a submission has arrays for each rank, those of rank r are r * k to (r + 1) * k - 1, of k together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import direct, pairwise, ring, shared_halves
from ringreduce.errors import MismatchError
from ringreduce.execution.allreduce import allreduce
from ringreduce.execution.context import Context, Operation
from ringreduce.execution.operations import integers_of_all
from ringreduce.execution.submission import Submission
from ringreduce.gpu.through_host import down, room, up
from ringreduce.ops import Reduction
from ringreduce.transport.base import Steps


def all_gather(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Copy the k inputs of every rank into the outputs of all."""
    rank, size, region = context.transport.rank, context.transport.size, context.algorithms.shared_region
    for submission in submissions:
        sources, results = yield from _on_host(submission, context)
        targets = _by_rank(results, size)
        for source, target in zip(sources, targets[rank], strict=True):
            if source.ctypes.data != target.ctypes.data:
                target[...] = source
        if region is not None:
            targets[rank] = []
            yield from shared_halves.allgather(sources, targets, region)
        else:
            everyones = np.empty((size, sum(each.nbytes for each in sources)), np.uint8)
            for part, source in _parts(everyones[rank], sources):
                part[...] = source
            counts = [everyones.shape[1]] * size
            yield from ring.allgather(
                everyones.reshape(-1), context.transport, counts, rank, context.algorithms.segment_bytes
            )
            for whole, into in zip(everyones, targets, strict=True):
                for part, target in _parts(whole, into):
                    target[...] = part
        _complete(submission, results, context)


def reduce_scatter(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Reduce the inputs for each rank, of all ranks, into the k outputs of that one; parts may differ by rank."""
    size, region = context.transport.size, context.algorithms.shared_region
    for submission in submissions:
        sources, targets = yield from _on_host(submission, context)
        parts = _by_rank(sources, size)
        reductions = [submission.reduction(each.element) for each in submission.outputs]
        for reduction in dict.fromkeys(reductions):
            mine = [k for k, each in enumerate(reductions) if each == reduction]
            chunks, results = [[each[k] for k in mine] for each in parts], [targets[k] for k in mine]
            if region is not None:
                yield from shared_halves.reduce_scatter(chunks, results, region, reduction)
            else:
                yield from _by_messages(chunks, results, reduction, context)
        _complete(submission, targets, context)


def _by_messages(chunks: list[list[Any]], results: list[Any], reduction: Reduction, context: Context) -> Steps[None]:
    transport, segment_bytes = context.transport, context.algorithms.segment_bytes
    counts = [sum(each.size for each in parts) for parts in chunks]
    work = np.concatenate([each for parts in chunks for each in parts])
    if context.settings.deterministic:
        yield from direct.scatter_reduce(work, transport, reduction, segment_bytes, counts)
    else:
        yield from ring.scatter_reduce(work, transport, reduction, segment_bytes, counts, transport.rank)
    low = sum(counts[: transport.rank])
    for part, target in _parts(work[low:].view(np.uint8), results):
        target[...] = part


def exchange(submissions: Sequence[Submission], context: Context) -> Steps[None]:
    """Input r goes to rank r, whose own one comes into output r.  payload: True where sizes may not fit each other."""
    rank, size, transport = context.transport.rank, context.transport.size, context.transport
    for submission in submissions:
        outgoing, incoming = yield from _on_host(submission, context)
        if submission.payload:
            counts = np.array([each.size for each in (*outgoing, *incoming)], np.int64)
            everyones = yield from integers_of_all(counts, context)
            sent, expected = everyones[:, :size], everyones[:, size:].T
            if (sent != expected).any():
                source, to = np.argwhere(sent != expected)[0].tolist()
                submission.fail(
                    MismatchError(
                        f"rank {context.members[rank]}, {submission.signature.kind} {submission.signature.name!r} "
                        f"({submission.line}): rank {context.members[source]} sends {sent[source, to]} elements to "
                        f"rank {context.members[to]}, which expects {expected[source, to]}; splits must fit"
                    )
                )
                continue
        yield from pairwise.exchange(outgoing, incoming, transport)
        _complete(submission, incoming, context)


def _on_host(submission: Submission, context: Context) -> Steps[tuple[list[Any], list[Any]]]:
    """The elements of its inputs, and room for those of its outputs."""
    sources = []
    for each in submission.inputs:
        sources.append((yield from down(each, context)))
    return sources, [room(each) for each in submission.outputs]


def _complete(submission: Submission, results: Sequence[Any], context: Context) -> None:
    for elements, output in zip(results, submission.outputs, strict=True):
        up(elements, output, context)
    submission.complete()


def _by_rank(arrays: Sequence[Any], size: int) -> list[list[Any]]:
    count = len(arrays) // size
    return [list(arrays[rank * count : (rank + 1) * count]) for rank in range(size)]


def _parts(whole: Any, arrays: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The bytes of a whole, cut for these arrays one after the other, and those of each."""
    low = 0
    for each in arrays:
        yield whole[low : low + each.nbytes], each.view(np.uint8)
        low += each.nbytes


def _recorded(operation: Operation) -> Operation:
    """The operation, in the timeline as one phase with the name of its kind."""

    @functools.wraps(operation)
    def run(submissions: Sequence[Submission], context: Context) -> Steps[None]:
        with context.timeline.phase(submissions, submissions[0].signature.kind.upper()):
            yield from operation(list(submissions), context)

    return run


INTO_OUTPUTS: Mapping[str, Operation] = {
    "reduce": allreduce,
    "all_gather": _recorded(all_gather),
    "reduce_scatter": _recorded(reduce_scatter),
    **dict.fromkeys(("all_to_all", "gather", "scatter"), _recorded(exchange)),
}
