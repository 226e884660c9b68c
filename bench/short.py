"""Short synchronous calls, ours beside MPI's, in one run, turn about: what a training step's small sums cost.

    ringrun -np 2 python bench/short.py
    ringrun -np 4 python bench/short.py --json short.json

`size` is what each rank passes; of a reduce-scatter the whole, of an allgather its part; float32. Per operation:

    ordered    rr.ordered()'s, of a known call: on one host the lane, see ringreduce/execution/lane.py
    named      the public function, by name
    MPI        Allreduce, Reduce_scatter_block, Allgather, Bcast, Barrier

All work in place, or into memory that is kept: new memory costs more than to fill it.

Columns: µs of one call (median of several runs, of the slowest rank); how often MPI's is contained in that; wrong
elements. `161 named` is a step of so many known tensors of 8 bytes, all submitted and then waited for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from common import (
    Column,
    Report,
    in_turns,
    main,
    microseconds,
    neutral,
    seconds_per_run,
    total,
)

import ringreduce as rr

SIZES = (8, 4096, 65536)
TENSORS = 161
SECONDS_PER_RUN = 0.1
COLUMNS = (
    Column("operation", "operation", width=15, left=True),
    Column("size", "size", "B", 8, "d"),
    Column("who", "who", width=10, left=True),
    Column("time_us", "time", "us", 12, ".1f"),
    Column("times_mpi", "times", "MPI's", 10, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
Contender = Callable[[], Any]
"""Does the operation once; returns the result."""


class Case(NamedTuple):
    """One operation."""

    who: dict[str, Contender]
    expected: Any
    before: Callable[[], object]  # the check: gives the input its values


def known(count: int, rank: int) -> np.ndarray[Any, Any]:
    """Small whole numbers, others on each rank and at each index; their largest stays what it is."""
    return ((np.arange(count) % 61 + 3 * rank) % 127).astype(np.float32)


def cases(count: int, channel: Any) -> dict[str, Case]:
    """All operations on `count` elements; maxima in place, so that a loop of them does not overflow."""
    from mpi4py import MPI

    comm, size, rank = neutral(), rr.size(), rr.rank()
    everyones = [known(count, each) for each in range(size)]
    array, part, wholes = known(count, rank), np.empty(count, np.float32), np.empty(size * count, np.float32)
    wide = np.tile(array, size)
    summed = np.add.reduce(everyones)

    def into(memory: Any, action: Callable[[], object]) -> Contender:
        return lambda: (action(), memory)[1]

    def reset() -> None:
        array[...] = known(count, rank)

    everything = np.concatenate(everyones)
    return {
        "allreduce": Case(
            {
                "ordered": lambda: channel.allreduce_(array, op=rr.Max),
                "named": lambda: rr.allreduce_(array, op=rr.Max, name=f"short {count}"),
                "MPI": into(array, lambda: comm.Allreduce(MPI.IN_PLACE, array, MPI.MAX)),
            },
            np.maximum.reduce(everyones),
            reset,
        ),
        "broadcast": Case(
            {
                "ordered": lambda: channel.broadcast_(array, 0),
                "named": lambda: rr.broadcast_(array, 0, name=f"short {count}"),
                "MPI": into(array, lambda: comm.Bcast(array, 0)),
            },
            everyones[0],
            reset,
        ),
        "allgather": Case(
            {
                "ordered": lambda: channel.allgather(array, out=wholes),
                "named": lambda: rr.allgather(array, name=f"short {count}", out=wholes),
                "MPI": into(wholes, lambda: comm.Allgather(array, wholes)),
            },
            everything,
            reset,
        ),
        "reducescatter": Case(
            {
                "ordered": lambda: channel.reducescatter(wide, op=rr.Sum, out=part),
                "named": lambda: rr.reducescatter(wide, op=rr.Sum, name=f"short {count}", out=part),
                "MPI": into(part, lambda: comm.Reduce_scatter_block(wide, part)),
            },
            summed,
            lambda: part.fill(-1),
        ),
    }


def barriers(channel: Any) -> Case:
    """Without elements."""
    return Case({"ordered": channel.barrier, "named": rr.barrier, "MPI": neutral().Barrier}, None, lambda: None)


def many() -> Case:
    """A step of many known tensors."""
    tensors = [known(2, rr.rank()) for _ in range(TENSORS)]

    def step() -> Any:
        handles = [rr.allreduce_async_(each, op=rr.Max, name=f"many {k}") for k, each in enumerate(tensors)]
        return [rr.synchronize(each) for each in handles][-1]

    expected = np.maximum.reduce([known(2, rank) for rank in range(rr.size())])
    return Case({f"{TENSORS} named": step}, expected, lambda: tensors[-1].__setitem__(slice(None), known(2, rr.rank())))


def wrong(case: Case, name: str) -> int:
    """Wrong elements of all ranks after one more call."""
    case.before()
    result = case.who[name]()
    return total(0 if case.expected is None else int((result != case.expected).sum()))


def bench(options: argparse.Namespace, report: Report) -> None:
    """Measure size by size."""
    channel = rr.ordered()
    found = [("barrier", 0, barriers(channel)), ("allreduce", 8, many())]
    for size in SIZES:
        found += [(operation, size, case) for operation, case in cases(size // 4, channel).items()]
    for operation, size, case in found:
        times = in_turns(case.who, options.runs, seconds_per_run(options, SECONDS_PER_RUN))
        rows = {name: microseconds(each) for name, each in times.items()}
        for name, row in rows.items():
            row |= {"operation": operation, "who": name, "size": size, "wrong": wrong(case, name)}
            report.add({**row, "times_mpi": row["time_us"] / rows["MPI"]["time_us"] if "MPI" in rows else None})


if __name__ == "__main__":
    note = "median of {runs} runs, turn about, of the slowest rank"
    main("short", __doc__, COLUMNS, bench, runs=9, note=note, in_job=True)
