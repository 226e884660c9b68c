"""All-reduce of one buffer: our algorithms beside MPI_Allreduce, torch gloo and Horovod, in one run, on one memory.

    ringrun -np 4 python bench/allreduce.py
    ringrun -np 4 python bench/allreduce.py --json allreduce.json --plot allreduce.png

One call is one number of ranks. Prints the table that nccl-tests made standard. Per size and algorithm:

    size     bytes of the buffer on each rank         count   its elements
    time     µs of one all-reduce: the median of several runs, of the slowest rank
    algbw    size / time, GB/s (1 GB = 1e9 bytes)
    busbw    algbw * 2 (P - 1) / P, GB/s: what each rank sends; comparable between numbers of ranks
    #wrong   elements that differ from the expected result after the timed runs; must be 0

The algorithms take turns, run by run, so that a change of the machine's speed meets all of them. Every rank and every
index has its own data, restored before each check. `allreduce_` is the public function: the engine agrees on what is
reduced, chooses how, and reduces. The other names of ours are algorithms called directly. A peer that is not installed
is left out. Horovod, whose thread polls from its init() on, is measured after all others.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import plots
from common import (
    Column,
    Report,
    flag,
    in_turns,
    main,
    microseconds,
    seconds_per_run,
    total,
)
from contenders import DTYPES, Contender, contenders, element_dtype, horovod, missing, stop_gloo

import ringreduce as rr

SECONDS_PER_RUN = 0.02
COLUMNS = (
    Column("algorithm", "algorithm", width=16, left=True),
    Column("size", "size", "B", 11, "d"),
    Column("count", "count", "elements", 12, "d"),
    Column("type", "type", width=9),
    Column("op", "op", width=5),
    Column("time_us", "time", "us", 12, ".1f"),
    Column("algbw_gbs", "algbw", "GB/s", 9, ".3f"),
    Column("busbw_gbs", "busbw", "GB/s", 9, ".3f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def fill(array: np.ndarray[Any, Any], rank: int) -> None:
    """Give every rank and index its own small whole number, so that every sum is exact in every type."""
    array[...] = (np.arange(array.size) % 61 + 3 * rank) % 127


def expected_sum(count: int, size: int) -> np.ndarray[Any, Any]:
    """What `fill` on all ranks sums up to, in float64."""
    expected, part = np.zeros(count), np.empty(count)
    for rank in range(size):
        fill(part, rank)
        expected += part
    return expected


def wrong_elements(algorithm: Contender, array: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> int:
    """Of all ranks together, after one more call on data that is known; bfloat16 may round as often as it is added."""
    fill(array, rr.rank())
    algorithm(array)
    tolerance = rr.size() * 2**-8 if array.dtype.name == "bfloat16" else 0
    return total(int((np.abs(array.astype(np.float64) - expected) > tolerance * expected).sum()))


def measure(compared: dict[str, Contender], nbytes: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One size: a row for each algorithm."""
    dtype = element_dtype(options.dtype)
    count = max(1, nbytes // dtype.itemsize)
    array = np.zeros(count, dtype)
    actions = {name: lambda algorithm=algorithm: algorithm(array) for name, algorithm in compared.items()}
    # zeros before each turn: sums of sums would run into infinity
    times = in_turns(actions, options.runs, seconds_per_run(options, SECONDS_PER_RUN), before=lambda: array.fill(0))
    expected = expected_sum(count, rr.size())
    rows = []
    for name, algorithm in compared.items():
        timed = microseconds(times[name])
        algbw = array.nbytes / timed["time_us"] / 1e3
        row = {"algorithm": name, "size": array.nbytes, "count": count, "type": options.dtype, "op": "sum"}
        row |= {"algbw_gbs": algbw, "busbw_gbs": algbw * 2 * (rr.size() - 1) / rr.size(), **timed}
        rows.append({**row, "wrong": wrong_elements(algorithm, array, expected)})
    return rows


def sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """The sizes to measure, in bytes; the largest is always among them."""
    steps = []
    while smallest < largest:
        steps.append(smallest)
        smallest *= factor
    return [*steps, largest]


def plot(report: Report, path: str) -> None:
    """Time and bus bandwidth over size, all axes logarithmic."""
    names = list(dict.fromkeys(row["algorithm"] for row in report.rows))
    colour = plots.colours(names)
    figure, axes = plots.canvas(1, 2, (12, 5))
    for name in names:
        rows = [row for row in report.rows if row["algorithm"] == name]
        for panel, key in zip(axes[0], ("time_us", "busbw_gbs"), strict=True):
            panel.plot([r["size"] for r in rows], [r[key] for r in rows], "o-", ms=3, label=name, color=colour[name])
    captions = "time of one all-reduce (µs): lower is better", "bus bandwidth (GB/s): higher is better"
    for panel, caption in zip(axes[0], captions, strict=True):
        panel.set(xscale="log", yscale="log", xlabel="size of the buffer", title=caption)
        plots.bytes_axis(panel.xaxis)
        panel.grid(which="major", alpha=0.3)
    axes[0][0].legend()
    header = report.header
    where = f"{header['ranks']} ranks on {header['hosts']} host" + "s" * (header["hosts"] > 1)
    plots.finish(figure, f"All-reduce of one {report.rows[0]['type']} buffer, {where}", header, path)


def check(options: argparse.Namespace) -> str:
    """What is wrong with the options."""
    if options.quick:
        options.factor = max(64, options.factor)
    if not 0 < options.min_bytes <= options.max_bytes or options.factor < 2:
        return "expected 0 < --min-bytes <= --max-bytes, and --factor of 2 or more"
    return ""


def bench(options: argparse.Namespace, report: Report) -> None:
    """Measure size by size, print each row as it comes."""
    for compared in (contenders, horovod):
        found = {name: each for name, each in compared(options.dtype).items() if name in (options.only or [name])}
        for nbytes in sizes(options.min_bytes, options.max_bytes, options.factor) if found else ():
            for row in measure(found, nbytes, options):
                report.add(row)
    stop_gloo()


if __name__ == "__main__":
    flags = [
        flag("--min-bytes", 8, metavar="N", help="smallest size (%(default)s)"),
        flag("--max-bytes", 256 << 20, 1 << 20, metavar="N", help="largest size (256 MiB)"),
        flag("--factor", 4, metavar="N", help="from one size to the next (%(default)s)"),
        flag("--dtype", "float32", choices=DTYPES),
        flag("--only", None, nargs="+", metavar="NAME", help="these algorithms only"),
    ]
    note = "median of {runs} runs, the algorithms in turns; 1 GB = 1e9 bytes" + missing()
    main("allreduce", __doc__, COLUMNS, bench, flags, runs=7, note=note, check=check, in_job=True, plot=plot)
