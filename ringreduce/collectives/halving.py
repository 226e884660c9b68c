"""Recursive halving and doubling on a circle: an all-reduce in 2 log2 P steps of as few bytes as the ring, for any P.

The buffer is cut into P chunks. At first each rank holds its part of all of them, counted from its own chunk on, around
the circle. In each step it gives the farther half away: with s chunks held and h = s / 2, rounded up, chunks h to s - 1
go to the rank h ahead, for which they are the first ones, and as many come from the rank h behind. With P = 5:

    chunks held, from the own one on      rank r sends                    and adds, to its chunks
     r   r+1  r+2  r+3  r+4               r+3 r+4     to rank r+3         r   r+1     what rank r-3 = r+2 sends
     r   r+1  r+2                         r+2         to rank r+2         r           what rank r-2 = r+3 sends
     r   r+1                              r+1         to rank r+1         r           what rank r-1 = r+4 sends
     r                                    the sum of all: reduce-scatter is done

Then all steps backwards: chunks 0 to s - h - 1 go to the rank h behind, for which they are its chunks h to s - 1. Where
P is a power of two the halves are halves; where it is not, no rank waits for another to fold in, as in Rabenseifner's
algorithm: all ranks do the same, and none sends or receives more than the ring's bytes.

Chunks that go beyond the last one, on the circle, are two pieces of memory, and so two messages.

Cost: 2 log2 P steps, rounded up; every rank sends and receives 2 n (P - 1) / P elements. Ranks that are far from each
other talk, and where few bytes are sent the ring's neighbours need P - 1 steps; where many are, both take the time of
the bytes. A step's messages are cut into segments, each added as it arrives; a step begins when the one before has
ended, so that several buckets under way fill the wire.

A chunk is summed along a tree, by its owner at last, and then copied, so all ranks get the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.partition import chunk_bounds, halvings, segments
from ringreduce.collectives.ring import SEGMENT_BYTES, Workspace
from ringreduce.transport.base import Steps, Transport, Work

TAG = 3


def allreduce(
    flat: Any,
    transport: Transport,
    reduction: Reduction,
    segment_bytes: int = SEGMENT_BYTES,
    workspace: Workspace | None = None,
) -> Steps[None]:
    """Reduce `flat` over all ranks, in place; every rank gets the same bits.

    Shape:  (count,), contiguous, NumPy, `reduction.element.storage`; equal counts on all ranks.
    workspace: as in `ring.allreduce`, its `scratch` at least count / 2 + size elements. By default it is made here.
    Cost:   2 log2(size) messages a rank, rounded up, cut into segments; about 2 count (size - 1) / size elements sent
            by each. Partial results travel in `reduction.sum_type`, finished ones as they are. Memory: half of `flat`
            in `sum_type`, and a copy of it where that is wider.
    Source: Rabenseifner, "Optimization of collective reduction operations", 2004; for any number of ranks Träff,
            "Optimal, non-pipelined reduce-scatter and allreduce algorithms", 2024.
    """
    partial = reduction.start(flat) if workspace is None else workspace.partial
    rank, size = transport.rank, transport.size
    steps = halvings(size)
    halves = _Halves(transport, chunk_bounds(flat.size, size), segment_bytes)
    scratch = _scratch(partial, halves, steps) if workspace is None else workspace.scratch
    for held, half in steps:
        receives = halves.swap(partial, half, held, rank + half, scratch, rank - half)
        for (low, high), into, received in receives:
            yield received
            reduction.combine(partial[low:high], into)
    for low, high in halves.ranges(0, 1):
        reduction.finish(partial[low:high], flat[low:high])
    yield from halves.sends  # their memory is received into from here on
    halves.sends = []
    for held, half in reversed(steps):
        for _, _, received in halves.swap(flat, 0, held - half, rank - half, None, rank + half, half):
            yield received
    yield from halves.sends


def _scratch(partial: Any, halves: _Halves, steps: list[tuple[int, int]]) -> Any:
    """Memory for what one step receives to be added."""
    longest = max((sum(high - low for low, high in halves.ranges(0, held - half)) for held, half in steps), default=0)
    return np.empty(longest, partial.dtype)


class _Halves:
    """The messages of one rank; chunks are counted from its own one on."""

    def __init__(self, transport: Transport, bounds: list[int], segment_bytes: int) -> None:
        self.transport, self.bounds, self.segment_bytes = transport, bounds, segment_bytes
        self.sends: list[Work] = []

    def ranges(self, first: int, last: int) -> list[tuple[int, int]]:
        """The elements of chunks first:last: one range or two, none of them empty."""
        rank, size, bounds = self.transport.rank, self.transport.size, self.bounds
        first, last = (rank + first) % size, (rank + last - 1) % size + 1
        parts = [(first, last)] if first < last else [(first, size), (0, last)]
        return [(bounds[low], bounds[high]) for low, high in parts if bounds[low] < bounds[high]]

    def swap(
        self, array: Any, first: int, last: int, ahead: int, scratch: Any, behind: int, into: int = 0
    ) -> list[tuple[tuple[int, int], Any, Work]]:
        """Send chunks first:last to one rank, and receive as many, from `into` on, from another.

        Returns what is received: its elements, the memory (in `scratch`, or its own place in the array), the request.
        """
        size, length = self.transport.size, max(1, self.segment_bytes // array.itemsize)
        found, start = [], 0
        for whole in self.ranges(into, into + last - first):
            for low, high in segments(*whole, length):
                memory = array[low:high] if scratch is None else scratch[start : start + high - low]
                found.append(((low, high), memory, self.transport.receive(memory, behind % size, TAG)))
                start += high - low
        for whole in self.ranges(first, last):
            for low, high in segments(*whole, length):
                self.sends.append(self.transport.send(array[low:high], ahead % size, TAG))
        return found
