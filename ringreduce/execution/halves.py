"""Allgather and reduce-scatter of host arrays: through the window where all data goes there, else by messages.

Arrays are 1-D and contiguous. A list of lists has those of each rank, by rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import bruck, direct, ring, shared_halves
from ringreduce.collectives.ops import Reduction
from ringreduce.execution.context import Context
from ringreduce.execution.submission import Submission
from ringreduce.transport.base import Steps

Arrays = Sequence[Any]
Move = Callable[[Arrays, Arrays], Steps[None]]
"""From the elements of a submission's inputs to those of its outputs."""


def on_host(submissions: Sequence[Submission], phase: str, move: Move, context: Context) -> Steps[None]:
    """Move the elements of submissions, which may be on a GPU, through host memory together, and complete them."""
    sources = []
    for each in (array for submission in submissions for array in submission.inputs):
        sources.append((yield from context.gpu.down(each)))
    outputs = [array for submission in submissions for array in submission.outputs]
    targets = [context.gpu.room(each) for each in outputs]
    with context.timeline.phase(submissions, phase):
        yield from move(sources, targets)
    for elements, output in zip(targets, outputs, strict=True):
        context.gpu.up(elements, output)
    for submission in submissions:
        submission.complete()


def integers_of_all(values: Any, context: Context) -> Steps[Any]:
    """Every rank's integers, by rank; the same number on each."""
    if context.algorithms.shared_region is None:
        return (yield from bruck.allgather(values, context.transport))
    found = np.empty((context.transport.size, values.size), np.int64)
    yield from shared_halves.allgather([values], [[each] for each in found], context.algorithms.shared_region)
    return found


def allgather(sources: Arrays, targets: Sequence[Arrays], context: Context, wholes: Arrays = ()) -> Steps[None]:
    """Copy every rank r's sources into targets[r] of all ranks.

    wholes: where array k of all ranks is wanted as one, that one: the targets are its parts, so nothing is packed.
    """
    rank, region = context.transport.rank, context.algorithms.shared_region
    for source, target in zip(sources, targets[rank], strict=True):
        if source.ctypes.data != target.ctypes.data:
            target[...] = source
    if region is not None:
        yield from shared_halves.allgather(sources, [*targets[:rank], [], *targets[rank + 1 :]], region)
    elif not wholes:
        yield from _allgather_packed(sources, targets, context)
    for number, whole in enumerate(wholes if region is None else ()):
        counts = [each[number].size for each in targets]
        yield from ring.allgather(whole, context.transport, counts, rank, context.algorithms.segment_bytes)


def _allgather_packed(sources: Arrays, targets: Sequence[Arrays], context: Context) -> Steps[None]:
    rank, counts = context.transport.rank, [sum(each.nbytes for each in into) for into in targets]
    packed = np.empty(sum(counts), np.uint8)
    for part, source in _parts(packed[sum(counts[:rank]) :], sources):
        part[...] = source
    yield from ring.allgather(packed, context.transport, counts, rank, context.algorithms.segment_bytes)
    for part, target in _parts(packed, itertools.chain.from_iterable(targets)):
        target[...] = part


def reduce_scatter(
    chunks: Sequence[Arrays], results: Arrays, reductions: Sequence[Reduction], context: Context
) -> Steps[None]:
    """Reduce chunks[r] of all ranks into rank r's results; lengths may differ by rank.  reductions: of each array."""
    region = context.algorithms.shared_region
    for reduction in dict.fromkeys(reductions):
        mine = [k for k, each in enumerate(reductions) if each == reduction]
        parts, into = [[each[k] for k in mine] for each in chunks], [results[k] for k in mine]
        if region is not None:
            yield from shared_halves.reduce_scatter(parts, into, region, reduction)
        else:
            yield from _reduce_scatter_packed(parts, into, reduction, context)


def _reduce_scatter_packed(
    chunks: Sequence[Arrays], results: Arrays, reduction: Reduction, context: Context
) -> Steps[None]:
    transport, segment_bytes = context.transport, context.algorithms.segment_bytes
    counts = [sum(each.size for each in parts) for parts in chunks]
    work = np.concatenate([each for parts in chunks for each in parts])
    if context.settings.deterministic:
        yield from direct.scatter_reduce(work, transport, reduction, segment_bytes, counts)
    else:
        reduction = context.algorithms.on_wire("ring", reduction)
        yield from ring.scatter_reduce(work, transport, reduction, segment_bytes, counts, transport.rank)
    low = sum(counts[: transport.rank])
    for part, target in _parts(work[low:].view(np.uint8), results):
        target[...] = part


def _parts(whole: Any, arrays: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """The bytes of a whole, cut for these arrays one after the other, and those of each."""
    low = 0
    for each in arrays:
        yield whole[low : low + each.nbytes], each.view(np.uint8)
        low += each.nbytes
