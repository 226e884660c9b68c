"""What `ringrun doctor` runs on each host: one rank of an MPI job, which measures its link to every other rank.

    round 1: 0-3, 1-2 · round 2: 0-2, 1-3 · …        nobody is in two pairs at once

A pair measures its latency, half of a round trip of four bytes, and its bandwidth: what ringreduce's own ring sends in
each direction per second while it reduces a buffer that takes about ATTEMPT_S. Every pair's lower rank writes one line
of JSON when it begins, and one when it has its figures: of a link that hangs the first has come.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

Pair = tuple[int, int]

LATENCY_ROUNDS = 200
ATTEMPTS = 5
ATTEMPT_S = 0.05
FIRST_BYTES = 1 << 18
MOST_BYTES = 1 << 26


def rounds(count: int) -> list[list[Pair]]:
    """Return all pairs of `count` hosts, as rounds in which no host is in two pairs: the circle method.

    One host stays, the others go around it, and who stands opposite is the pair. With an odd number one pauses.

        0 1 2      0 5 1      0 4 5
        5 4 3      4 3 2      3 2 1      …    6 hosts: 5 rounds of 3 pairs

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    circle = list(range(count + count % 2))  # the last is nobody where the number is odd
    found = []
    for _ in range(len(circle) - 1):
        opposite = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        pairs = sorted((min(pair), max(pair)) for pair in opposite)
        found.append([pair for pair in pairs if pair[1] < count])
        circle.insert(1, circle.pop())
    return found


def main() -> None:
    """Measure this rank's links."""
    from ringreduce.transport.message import MessageTransport
    from ringreduce.transport.mpi import finalize_mpi
    from ringreduce.transport.world import form_world

    world = form_world()
    whole = MessageTransport(world)
    for pairs in rounds(world.size):
        for pair in pairs:
            if world.rank in pair:
                _measure(pair, whole)
        world.comm.Barrier()
    world.free()
    finalize_mpi()


def _measure(pair: Pair, whole: Any) -> None:
    from ringreduce.transport.subset import SubsetTransport

    transport = SubsetTransport(whole, pair, 0)
    _report(transport.rank, pair)
    latency_us = _latency_us(transport)
    count_bytes = FIRST_BYTES
    _reduce_s(transport, count_bytes)  # the first one connects
    rate = FIRST_BYTES / _reduce_s(transport, count_bytes)
    count_bytes = int(_agreed(transport, max(FIRST_BYTES, min(MOST_BYTES, rate * ATTEMPT_S))))
    took_s = statistics.median(_reduce_s(transport, count_bytes) for _ in range(ATTEMPTS))
    _report(transport.rank, pair, latency_us=latency_us, gbit_s=8e-9 * count_bytes / took_s)


def _report(rank: int, pair: Pair, **figures: float) -> None:
    if rank == 0:
        print(json.dumps({"link": pair, **figures}), flush=True)


def _latency_us(transport: Any) -> float:
    """The best of several: what else the hosts did is not the network's."""
    import numpy as np

    ball = np.zeros(1, np.float32)
    best_s = float("inf")
    for _ in range(LATENCY_ROUNDS):
        began_s = time.perf_counter()
        if transport.rank == 0:
            transport.send(ball, 1, 0).wait()
        transport.receive(ball, 1 - transport.rank, 0).wait()
        if transport.rank == 1:
            transport.send(ball, 0, 0).wait()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s / 2 * 1e6


def _reduce_s(transport: Any, count_bytes: int) -> float:
    """Return how long an allreduce takes; each of the two sends `count_bytes` in it, and its sum is checked."""
    import numpy as np

    from ringreduce.arrays.dtypes import element_type
    from ringreduce.collectives import ring
    from ringreduce.ops import Reduction, Sum
    from ringreduce.transport.base import complete

    flat = np.full(count_bytes // 4, 1.0 + transport.rank, np.float32)
    began_s = time.perf_counter()
    complete(ring.allreduce(flat, transport, Reduction(Sum, element_type(flat.dtype), 2)))
    took_s = time.perf_counter() - began_s
    if not (flat == 3.0).all():
        raise RuntimeError(f"the sum over a pair of hosts is wrong: expected 3.0, found {flat[flat != 3.0][0]}")
    return took_s


def _agreed(transport: Any, value: float) -> float:
    """Return rank 0's value on both."""
    import numpy as np

    box = np.array([value], np.float64)
    if transport.rank == 0:
        transport.send(box, 1, 0).wait()
    else:
        transport.receive(box, 0, 0).wait()
    return float(box[0])


if __name__ == "__main__":
    main()
