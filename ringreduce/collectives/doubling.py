"""Recursive doubling: an all-reduce in log2 P steps, for messages so small that only latency counts.

In step i every rank swaps its partial result with the rank that differs from it in bit i, and both combine the two.
With P = 4, `a02` being rank 0's and 2's part together:

            rank 0      rank 1      rank 2      rank 3
             a0          a1          a2          a3
              \\_________/             \\_________/              step 0: with the rank at distance 1
             a01         a01         a23         a23
              \\______________________/
                          \\______________________/             step 1: with the rank at distance 2
             A           A           A           A

Every rank holds the result of a row of ranks, which doubles with each step. Both partners compute the same expression,
the lower row first, so they get the same bits, and so do all ranks at the end.

Where P is not a power of two, some ranks fold in first: with P = 6, ranks 1 and 3 send their elements to ranks 0 and 2,
which go on with 4 and 5 as the four members 0 to 3, and send the finished result back last:

            0 + 1       2 + 3       4           5
            member 0    member 1    member 2    member 3

Cost: log2 P steps, all n elements in each: P n log2 P elements altogether, where the ring sends 2 n (P - 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.collectives.ops import Reduction
from ringreduce.transport.base import Steps, Transport

TAG = 7


def allreduce(flat: Any, transport: Transport, reduction: Reduction) -> Steps[None]:
    """Reduce `flat` over all ranks, in place; every rank gets the same bits.

    Shape:  (count,), contiguous, NumPy, `reduction.element.storage`; equal counts on all ranks.
    Cost:   log2(size) messages a rank of all elements, in `reduction.sum_type`; a rank that folds in sends one, and
            its partner one more. Memory: one copy of the partial results, two when they are wider than the elements.
    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    partial = reduction.start(flat)
    if transport.size > 1:
        partial = yield from combined(partial, np.empty_like(partial), transport, reduction.combine)
    reduction.finish(partial, flat)
    if partial is not flat and reduction.in_place:
        flat[...] = partial


def combined(
    partial: Any, room: Any, transport: Transport, combine: Callable[[Any, Any], object], count: int | None = None
) -> Steps[Any]:
    """Combine the ranks' partial results; returns the array that holds the result: `partial` or `room`.

    combine: changes its first array, the part of lower ranks.
    count:   elements to be sent, all by default. Others may send fewer or more, as far as there is room.
    """
    rank, size, at_most = transport.rank, transport.size, count is not None
    members = 1 << (size.bit_length() - 1)
    folded = size - members  # the number of odd ranks, from rank 1 on, that fold in
    folds = rank < 2 * folded
    if folds and rank % 2:
        yield transport.send(partial[:count], rank - 1, TAG)
        yield transport.receive(partial, rank - 1, TAG, at_most=at_most)
        return partial
    if folds:
        yield transport.receive(room, rank + 1, TAG, at_most=at_most)
        combine(partial, room)
    member = rank // 2 if folds else rank - folded
    distance = 1
    while distance < members:
        other = member ^ distance
        partner = 2 * other if other < folded else other + folded
        receive = transport.receive(room, partner, TAG, at_most=at_most)
        send = transport.send(partial[:count], partner, TAG)
        yield receive
        yield send
        if other < member:  # the lower row first: swap the two arrays
            partial, room = room, partial
        combine(partial, room)
        distance *= 2
    if folds:
        yield transport.send(partial[:count], rank + 1, TAG)
    return partial
