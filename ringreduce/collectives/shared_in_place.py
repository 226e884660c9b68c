"""The all-reduce of arrays that lie in memory which all ranks of a host have mapped: nothing is packed. No messages.

With two ranks, `a` and `b` the chunks of rank 0 and rank 1:

    rank 0's array    a0 b0  ---->  A  b0  ---->  A  B        each rank sums its chunk of all arrays, in rank order,
    rank 1's array    a1 b1         a1 B          A  B        and writes it to all, a piece at a time

Each rank reads n elements and writes n, which its cache has just read: less than a copy of the array takes. One wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.partition import chunk_bounds
from ringreduce.transport.base import Steps
from ringreduce.transport.window import PACKED, PIECE_BYTES, Region


def allreduce(arrays: Sequence[Any], region: Region, reduction: Reduction) -> Steps[None]:
    """Reduce the arrays of all ranks, by rank, each in place. All ranks must have come here: see `Signatures`.

    Shape:  1-D, `reduction.element.storage`, equal lengths.
    Result: the bits of `shared.allreduce`.
    """
    bounds = chunk_bounds(arrays[0].size, region.size)
    low, high = bounds[region.rank], bounds[region.rank + 1]
    length = PIECE_BYTES // reduction.element.itemsize  # its sum is in the cache yet when it is written to the others
    for start in range(low, high, length):
        pieces = [each[start : min(start + length, high)] for each in arrays]
        mine = pieces[region.rank]
        reduction.reduce_parts(pieces, mine)
        for other in pieces:
            if other is not mine:
                other[...] = mine
    sequence = region.sequence
    region.sequence = sequence + 1
    region.publish(PACKED, sequence)
    if not region.arrived(PACKED, sequence):
        yield region.arrival(PACKED, sequence)
