"""What it costs that all ranks agree on 161 named tensors (as many as ResNet-50 has), without any data.

    ringrun -np 2 python bench/agreement.py
    ringrun -np 4 python bench/agreement.py --json agreement.json

The tensors are empty, so a step is submission, agreement and completion only. Every rank has an order of its own. Rows:

    new            names that the ranks have never seen: full descriptions travel
    known          the same names again: a bit each
    one group      all in one grouped_allreduce
    8 bytes        one synchronous allreduce_ of one number, by name
    ordered        the same through `ordered()`: nothing is agreed on
    MPI_Allreduce  of 161 bits on all ranks, which is the least that any agreement of this kind can cost

time: µs a step, median of several runs, of the slowest rank; submit: the part of it that the calling thread spends on
submitting; messages and bytes: what rank 1 sends to the coordinator and what rank 0, the coordinator, sends, a step.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import ringreduce as rr

TENSORS = 161
STEPS = 20


class Row(NamedTuple):
    """One line of the table."""

    what: str
    time_us: float
    submit_us: float
    worker_messages: float
    worker_bytes: float
    leader_messages: float
    leader_bytes: float


def one_by_one(prefix: str, order: list[int], tensors: list[np.ndarray[Any, Any]]) -> float:
    """Submit all tensors on their own, then wait for all; returns the seconds that submitting took."""
    start = time.perf_counter()
    handles = [rr.allreduce_async_(tensors[k], name=f"{prefix}.{k}") for k in order]
    submitted = time.perf_counter() - start
    for handle in handles:
        rr.synchronize(handle)
    return submitted


def measured(what: str, step: Callable[[int], float], runs: int) -> Row:
    """The median over `runs` of the mean of some steps."""
    times, submits, counted = [], [], []
    number = 0
    for _ in range(runs):
        rr.barrier()
        before = rr.info()
        start = time.perf_counter()
        submitted = 0.0
        for _ in range(STEPS):
            submitted += step(number)
            number += 1
        elapsed = time.perf_counter() - start
        after = rr.info()
        counted.append(
            (
                (after.control_messages - before.control_messages) / STEPS,
                (after.control_bytes - before.control_bytes) / STEPS,
            )
        )
        times.append(float(rr.allreduce(elapsed / STEPS, op=rr.Max)))
        submits.append(float(rr.allreduce(submitted / STEPS, op=rr.Max)))
    messages = [statistics.median(column) for column in zip(*counted, strict=True)]
    everyones = rr.allgather_object(messages)
    worker, leader = everyones[-1], everyones[0]
    return Row(what, statistics.median(times) * 1e6, statistics.median(submits) * 1e6, *worker, *leader)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What agreeing on 161 named tensors costs.")
    parser.add_argument("--runs", type=int, default=7, help="the median is of so many (default 7)")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    rr.init()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    order = list(range(TENSORS))
    random.Random(rr.rank()).shuffle(order)  # noqa: S311 - an order, no secret
    tensors = [np.zeros(0, np.float32) for _ in order]
    bits, all_bits = np.zeros(-(-TENSORS // 8), np.uint8), np.zeros(-(-TENSORS // 8), np.uint8)

    def group(_: int) -> float:
        rr.grouped_allreduce_(tensors, name="group")
        return 0.0

    eight, channel = np.zeros(1), rr.ordered()

    def small(_: int) -> float:
        rr.allreduce_(eight, op=rr.Sum, name="small")
        return 0.0

    def ordered(_: int) -> float:
        channel.allreduce_(eight, op=rr.Sum)
        return 0.0

    def plain(_: int) -> float:
        comm.Allreduce(bits, all_bits, op=MPI.BAND)
        return 0.0

    rows = [
        measured("new", lambda step: one_by_one(f"new.{step}", order, tensors), options.runs),
        measured("known", lambda _: one_by_one("known", order, tensors), options.runs),
        measured("one group", group, options.runs),
        measured("8 bytes", small, options.runs),
        measured("ordered", ordered, options.runs),
        measured("MPI_Allreduce", plain, options.runs),
    ]
    if rr.rank() == 0:
        info = rr.info()
        print(f"{TENSORS} empty tensors, {rr.size()} ranks, {info.mpi}, ringreduce {info.version}")
        senders = f"rank {rr.size() - 1} sends", "rank 0 sends"
        print(f"{'what':<14}{'time':>8}{'submit':>8}   {senders[0]:>20}   {senders[1]:>20}")
        for row in rows:
            worker = f"{row.worker_messages:.1f} of {row.worker_bytes:.0f} B"
            leader = f"{row.leader_messages:.1f} of {row.leader_bytes:.0f} B"
            print(f"{row.what:<14}{row.time_us:>8.0f}{row.submit_us:>8.0f}   {worker:>20}   {leader:>20}")
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(
                    {"ranks": rr.size(), "mpi": info.mpi, "rows": [row._asdict() for row in rows]}, file, indent=1
                )


if __name__ == "__main__":
    main()
