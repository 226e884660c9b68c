"""Reduce-scatter, allgather and broadcast on one host: ours beside MPI's, in one run, turn about.

    ringrun -np 2 python bench/halves.py
    ringrun -np 4 python bench/halves.py --json halves.json --plot halves.png

`size` is that of the whole buffer: what each rank gives to a reduce-scatter, gets from an allgather, or holds after a
broadcast; float32. Per operation:

    in shared memory   ours, called directly, into memory that is there, as MPI's
    ringreduce         the public function: the engine agrees first, and makes the memory of the result
    ringreduce, out=   the same, into memory that is there
    MPI                Reduce_scatter, Allgatherv, Bcast
    floor: one copy    every rank copies as many bytes once, all at the same time

Columns: µs of one call (median of several runs, of the slowest rank); how often that is contained in MPI's; wrong
elements.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import plots
from common import (
    Column,
    Report,
    flag,
    in_turns,
    main,
    microseconds,
    neutral,
    seconds_per_run,
    total,
)
from contenders import global_algorithms

import ringreduce as rr
from ringreduce.arrays.dtypes import element_type
from ringreduce.collectives import shared_halves
from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.partition import by_chunk, chunk_bounds
from ringreduce.transport.base import complete

SECONDS_PER_RUN = 0.1
DIRECT, PUBLIC, KEPT, PEER = "in shared memory", "ringreduce", "ringreduce, out=", "MPI"
FLOOR = "floor: one copy"
COLUMNS = (
    Column("operation", "operation", width=15, left=True),
    Column("who", "who", width=18, left=True),
    Column("size", "size", "B", 11, "d"),
    Column("time_us", "time", "us", 12, ".1f"),
    Column("than_mpi", "faster", "than MPI", 10, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
Contender = Callable[[], np.ndarray[Any, Any]]
"""Does the operation once; returns the result."""


class Case(NamedTuple):
    """One operation."""

    who: dict[str, Contender]
    expected: np.ndarray[Any, Any]
    cleared: list[np.ndarray[Any, Any]]  # before the results are checked


def known(count: int, rank: int) -> np.ndarray[Any, Any]:
    """Small whole numbers, others on each rank and at each index, so that sums are exact."""
    return ((np.arange(count) % 61 + 3 * rank) % 127).astype(np.float32)


def cases(count: int) -> dict[str, Case]:
    """All operations, on the same memory."""
    comm, region, size = neutral(), global_algorithms().shared_region, rr.size()
    bounds = chunk_bounds(count, size)
    mine, counts = slice(*bounds[rr.rank() : rr.rank() + 2]), [b - a for a, b in itertools.pairwise(bounds)]
    whole = known(count, rr.rank())
    source, part = whole[mine].copy(), np.empty_like(whole[mine])
    gathered, sent, copied = np.empty_like(whole), known(count, rr.rank()), np.empty_like(whole)
    reduction = Reduction(rr.Sum, element_type(whole.dtype), size)

    def result(memory: np.ndarray[Any, Any], action: Callable[[], object]) -> Contender:
        def run() -> np.ndarray[Any, Any]:
            action()
            return memory

        return run

    scatters, gathers, sends = {}, {}, {}
    if region is not None:
        chunks, targets = by_chunk([whole], [bounds], size), by_chunk([gathered], [bounds], size)
        scatter = shared_halves.reduce_scatter
        scatters[DIRECT] = result(part, lambda: complete(scatter(chunks, [part], region, reduction)))
        gathers[DIRECT] = result(gathered, lambda: complete(shared_halves.allgather([source], targets, region)))
        sends[DIRECT] = result(sent, lambda: complete(shared_halves.broadcast([sent], 0, region)))
    scatters[PUBLIC] = lambda: rr.reducescatter(whole, op=rr.Sum)
    gathers[PUBLIC] = lambda: rr.allgather(source)
    scatters[KEPT] = lambda: rr.reducescatter(whole, op=rr.Sum, out=part)
    gathers[KEPT] = lambda: rr.allgather(source, out=gathered)
    sends[PUBLIC] = result(sent, lambda: rr.broadcast_(sent, 0))
    scatters[PEER] = result(part, lambda: comm.Reduce_scatter(whole, part, counts))
    gathers[PEER] = result(gathered, lambda: comm.Allgatherv(source, [gathered, counts]))
    sends[PEER] = result(sent, lambda: comm.Bcast(sent, 0))
    everyones = [known(count, rank) for rank in range(size)]
    gathering = np.concatenate(
        [each[low:high] for each, (low, high) in zip(everyones, itertools.pairwise(bounds), strict=True)]
    )
    floor = {FLOOR: result(copied, lambda: np.copyto(copied, whole))}
    return {
        "reducescatter": Case(scatters | floor, np.add.reduce(everyones)[mine], [part]),
        "allgather": Case(gathers | floor, gathering, [gathered]),
        "broadcast": Case(sends | floor, everyones[0], [sent] if rr.rank() else []),
    }


def wrong(name: str, case: Case) -> int | None:
    """Wrong elements of all ranks after one more run."""
    if name == FLOOR:
        return None
    for each in case.cleared:
        each.fill(-1)
    return total(int((case.who[name]() != case.expected).sum()))


def plot(report: Report, path: str) -> None:
    """A panel of bars for each operation."""
    operations = list(dict.fromkeys(row["operation"] for row in report.rows))
    figure, axes = plots.canvas(1, len(operations), (5 * len(operations), 3))
    for panel, operation in zip(axes[0], operations, strict=True):
        rows = [row for row in report.rows if row["operation"] == operation]
        colour = plots.colours([row["who"] for row in rows])
        panel.barh([row["who"] for row in rows], [row["time_us"] / 1e3 for row in rows], color=colour.values())
        panel.invert_yaxis()
        panel.set(xlabel="ms, lower is better", title=operation)
    header = report.header
    title = f"{report.rows[0]['size'] >> 20} MiB, {header['ranks']} ranks on one host"
    plots.finish(figure, title, header, path)


def bench(options: argparse.Namespace, report: Report) -> None:
    """Measure operation by operation."""
    for operation, case in cases(options.bytes // 4).items():
        times = in_turns(case.who, options.runs, seconds_per_run(options, SECONDS_PER_RUN))
        found = {name: microseconds(each) for name, each in times.items()}
        for name, row in found.items():
            row |= {"operation": operation, "who": name, "size": options.bytes, "wrong": wrong(name, case)}
            report.add({**row, "than_mpi": found[PEER]["time_us"] / row["time_us"]})


if __name__ == "__main__":
    size = flag("--bytes", 64 << 20, 1 << 18, metavar="N", help="size of the whole buffer (64 MiB)")
    note = "median of {runs} runs, turn about, of the slowest rank"
    main("halves", __doc__, COLUMNS, bench, [size], runs=7, note=note, in_job=True, plot=plot)
