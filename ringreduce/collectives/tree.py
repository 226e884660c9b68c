"""Broadcast along a binomial tree: a rank that has the data sends it to another rank in every round.

    round 0   0 -> 4           round 1   0 -> 2, 4 -> 6           round 2   0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7

Ranks are counted from the root. Long data goes in segments, so that the tree's levels work at the same time.
"""

from __future__ import annotations

from typing import Any

from ringreduce.collectives.partition import segments
from ringreduce.transport.base import Steps, Transport, Work

TAG = 2
SEGMENT_BYTES = 1 << 20


def broadcast(flat: Any, transport: Transport, root: int, segment_bytes: int = SEGMENT_BYTES) -> Steps[None]:
    """Copy the root's elements to all ranks, in place.

    Shape:  (count,), contiguous, NumPy or CuPy, any element type; equal counts on all ranks.
    Cost:   at most log2(size) messages sent by a rank, each of count elements, cut into segments.
    """
    rank, size = transport.rank, transport.size
    parent, children = family((rank - root) % size, size)
    sends: list[Work] = []
    for low, high in segments(0, flat.size, max(1, segment_bytes // flat.itemsize)):
        if parent is not None:
            yield transport.receive(flat[low:high], (parent + root) % size, TAG)
        sends += [transport.send(flat[low:high], (child + root) % size, TAG) for child in children]
    yield from sends


def family(node: int, size: int) -> tuple[int | None, list[int]]:
    """The parent and the children, farthest first, of a node of the tree; node 0 is the root.

    >>> family(4, 8)
    (0, [6, 5])
    """
    lowest_bit = node & -node or 1 << (size - 1).bit_length()
    parent = None if node == 0 else node - lowest_bit
    children = [node + (1 << bit) for bit in reversed(range(lowest_bit.bit_length() - 1))]
    return parent, [child for child in children if child < size]
