"""All-to-all by pairs: in round i a rank sends to the rank i after it and receives from the rank i before it.

    P = 4     round 1   0 -> 1 -> 2 -> 3 -> 0      round 2   0 <-> 2, 1 <-> 3      round 3   0 -> 3 -> 2 -> 1 -> 0

In every round each rank sends one message and receives one, so no rank is flooded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.collectives.partition import segments
from ringreduce.transport.base import Steps, Transport, Work

TAG = 4
SEGMENT_BYTES = 1 << 20


def alltoall(
    outgoing: Sequence[Any], incoming: Sequence[Any], transport: Transport, segment_bytes: int = SEGMENT_BYTES
) -> Steps[None]:
    """Send outgoing[r] to rank r; receive into incoming[r] what rank r has for this one.

    Shape:    each 1-D, contiguous, NumPy or CuPy, all of one element type; `incoming` and `outgoing` do not overlap.
    Cost:     size - 1 messages a rank, cut into segments; all elements but the rank's own part sent by each.
    Source:   Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    rank, size = transport.rank, transport.size
    length = max(1, segment_bytes // outgoing[rank].itemsize)
    incoming[rank][...] = outgoing[rank]
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        in_flight: list[Work] = [
            transport.receive(incoming[source][low:high], source, TAG)
            for low, high in segments(0, incoming[source].size, length)
        ]
        in_flight += [
            transport.send(outgoing[to][low:high], to, TAG) for low, high in segments(0, outgoing[to].size, length)
        ]
        yield from in_flight
