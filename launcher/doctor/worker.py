"""What `ringrun doctor` runs on each host: one rank of an MPI job, which measures its link to every other rank.

A pair measures its latency, half of a round trip of four bytes, and its bandwidth: what ringreduce's own ring sends in
each direction per second while it reduces a buffer that takes about ATTEMPT_S. Every pair's lower rank writes one line
of JSON when it begins, and one when it has its figures: of a link that hangs the first has come.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np

from ringreduce.arrays.dtypes import element_type
from ringreduce.collectives import ring
from ringreduce.collectives.ops import Reduction, Sum
from ringreduce.transport.base import complete
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.mpi import finalize_mpi
from ringreduce.transport.subset import SubsetTransport
from ringreduce.transport.world import form_world

from .links import rounds

LATENCY_ROUNDS = 200
ATTEMPTS = 5
ATTEMPT_S = 0.05
FIRST_BYTES = 1 << 18
MOST_BYTES = 1 << 26


def main() -> None:
    """Measure this rank's links."""
    world = form_world()
    whole = MessageTransport(world)
    for pairs in rounds(world.size):
        for pair in pairs:
            if world.rank in pair:
                _measure(pair, SubsetTransport(whole, pair, 0), world.control)
        world.comm.Barrier()
    world.free()
    finalize_mpi()


def _measure(pair: tuple[int, int], transport: SubsetTransport, control: Any) -> None:
    def report(**figures: float) -> None:
        if transport.rank == 0:
            print(json.dumps({"link": pair, **figures}), flush=True)

    report()
    latency_us = _latency_us(transport)
    _reduce_s(transport, FIRST_BYTES)  # the first one connects
    rate = FIRST_BYTES / _reduce_s(transport, FIRST_BYTES)
    other = pair[1 - transport.rank]
    rate = min(rate, control.sendrecv(rate, other, source=other))
    count_bytes = int(max(FIRST_BYTES, min(MOST_BYTES, rate * ATTEMPT_S)))
    took_s = statistics.median(_reduce_s(transport, count_bytes) for _ in range(ATTEMPTS))
    report(latency_us=latency_us, gbit_s=8e-9 * count_bytes / took_s)


def _latency_us(transport: SubsetTransport) -> float:
    """The best of several: what else the hosts did is not the network's."""
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


def _reduce_s(transport: SubsetTransport, count_bytes: int) -> float:
    """Return how long an allreduce takes; each of the two sends `count_bytes` in it, and its sum is checked."""
    flat = np.full(count_bytes // 4, 1.0 + transport.rank, np.float32)
    began_s = time.perf_counter()
    complete(ring.allreduce(flat, transport, Reduction(Sum, element_type(flat.dtype), 2)))
    took_s = time.perf_counter() - began_s
    if not (flat == 3.0).all():
        raise RuntimeError(f"the sum over a pair of hosts is wrong: expected 3.0, found {flat[flat != 3.0][0]}")
    return took_s


if __name__ == "__main__":
    main()
