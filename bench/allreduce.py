"""All-reduce of one buffer: our ring beside MPI_Allreduce, in the same run, on the same memory.

    ringrun -np 4 python bench/allreduce.py
    ringrun -np 4 python bench/allreduce.py --json allreduce.json --plot allreduce.png

Prints the table that nccl-tests made standard. Per row and algorithm:

    size     bytes of the buffer on each rank         count   its elements
    time     µs of one all-reduce: the median of several runs, of the slowest rank
    algbw    size / time, GB/s (1 GB = 1e9 bytes)
    busbw    algbw * 2 (P - 1) / P, GB/s: what each rank sends; comparable between numbers of ranks
    #wrong   elements that differ from the expected result after the timed runs; must be 0

The algorithms take turns, run by run, so that a change of the machine's speed meets all of them. Every rank and every
index has its own data, restored before each check. `ring` is the algorithm called directly, `allreduce_` the public
function, which agrees on what is reduced before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import ringreduce as rr
from ringreduce import runtime
from ringreduce.collectives import ring
from ringreduce.dtypes import element_type
from ringreduce.ops import Reduction
from ringreduce.transport.base import complete

RUNS = 7
SECONDS_PER_RUN = 0.02
Algorithm = Callable[[np.ndarray[Any, Any]], object]


class Row(NamedTuple):
    """One line of the table."""

    algorithm: str
    size: int
    count: int
    type: str
    op: str
    time_us: float
    algbw_gbs: float
    busbw_gbs: float
    wrong: int


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Our ring all-reduce beside MPI_Allreduce.")
    parser.add_argument("--min-bytes", type=int, default=8, metavar="N", help="smallest size (default 8)")
    parser.add_argument("--max-bytes", type=int, default=256 << 20, metavar="N", help="largest size (default 256 MiB)")
    parser.add_argument("--factor", type=int, default=4, metavar="N", help="from one size to the next (default 4)")
    parser.add_argument("--dtype", choices=["float32", "float64", "int32", "int64"], default="float32")
    parser.add_argument(
        "--runs", type=int, default=RUNS, metavar="N", help=f"the median is of so many (default {RUNS})"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows and the header there")
    parser.add_argument("--plot", metavar="FILE.png", help="draw bus bandwidth over size there (needs matplotlib)")
    options = parser.parse_args()
    if not 0 < options.min_bytes <= options.max_bytes or options.factor < 2 or options.runs < 1:
        parser.error("expected 0 < --min-bytes <= --max-bytes, --factor of 2 or more, and --runs of 1 or more")
    return options


def algorithms(dtype: str) -> dict[str, Algorithm]:
    """What is compared: each changes an array in place to the sum over all ranks."""
    from mpi4py import MPI

    current = runtime.current("bench")
    reduction = Reduction(rr.Sum, element_type(np.dtype(dtype)), rr.size())
    segment_bytes = current.settings.ring_segment_bytes
    comm = MPI.COMM_WORLD.Dup()
    return {
        "ring": lambda array: complete(ring.allreduce(array, current.transport, reduction, segment_bytes)),
        "allreduce_": lambda array: rr.allreduce_(array, op=rr.Sum),
        "MPI_Allreduce": lambda array: comm.Allreduce(MPI.IN_PLACE, array),
    }


def fill(array: np.ndarray[Any, Any], rank: int) -> None:
    """Give every rank and index its own small whole number, so that every sum is exact in every type."""
    array[...] = (np.arange(array.size) % 61 + 3 * rank) % 127


def expected_sum(count: int, dtype: str, size: int) -> np.ndarray[Any, Any]:
    """What `fill` on all ranks sums up to."""
    total = np.zeros(count, dtype)
    part = np.empty(count, dtype)
    for rank in range(size):
        fill(part, rank)
        total += part
    return total


def seconds_per_call(algorithm: Algorithm, array: np.ndarray[Any, Any], calls: int) -> float:
    """The mean over `calls`, on the slowest rank."""
    rr.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        algorithm(array)
    return float(rr.allreduce((time.perf_counter() - start) / calls, op=rr.Max))


def measure(compared: dict[str, Algorithm], nbytes: int, dtype: str, runs: int) -> list[Row]:
    """All algorithms on one size, in turns."""
    count = max(1, nbytes // np.dtype(dtype).itemsize)
    array = np.zeros(count, dtype)
    calls = {}
    for name, algorithm in compared.items():
        once = min(seconds_per_call(algorithm, array, 1) for _ in range(2))
        calls[name] = max(1, min(1000, int(SECONDS_PER_RUN / once)))
    times: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(runs):
        for name, algorithm in compared.items():
            array[...] = 0  # sums of sums would run into infinity
            times[name].append(seconds_per_call(algorithm, array, calls[name]))
    expected = expected_sum(count, dtype, rr.size())
    rows = []
    for name, algorithm in compared.items():
        fill(array, rr.rank())
        algorithm(array)
        wrong = int(rr.allreduce(int((array != expected).sum()), op=rr.Sum))
        seconds = statistics.median(times[name])
        algbw = array.nbytes / seconds / 1e9
        busbw = algbw * 2 * (rr.size() - 1) / rr.size()
        rows.append(Row(name, array.nbytes, count, dtype, "sum", seconds * 1e6, algbw, busbw, wrong))
    return rows


def sizes(smallest: int, largest: int, factor: int) -> list[int]:
    """The sizes to measure, in bytes; the largest is always among them."""
    steps = []
    while smallest < largest:
        steps.append(smallest)
        smallest *= factor
    return [*steps, largest]


def header() -> dict[str, Any]:
    """What a reader needs to trust the figures: versions and the machine."""
    import mpi4py
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return {
        "ranks": rr.size(),
        "hosts": rr.cross_size(),
        "cores": os.cpu_count(),
        "processor": processor(),
        "ringreduce": rr.__version__,
        "mpi4py": mpi4py.__version__,
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "numpy": np.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def plot(rows: list[Row], about: dict[str, Any], path: str) -> None:
    """Bus bandwidth and time over size, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    for name in dict.fromkeys(row.algorithm for row in rows):
        mine = [row for row in rows if row.algorithm == name]
        sizes = [row.size for row in mine]
        left.plot(sizes, [row.time_us for row in mine], marker="o", markersize=3, label=name)
        right.plot(sizes, [row.busbw_gbs for row in mine], marker="o", markersize=3, label=name)
    for axes, label in ((left, "time of one all-reduce (µs)"), (right, "bus bandwidth (GB/s)")):
        axes.set(xscale="log", yscale="log", xlabel="size of the buffer (bytes)", ylabel=label)
        axes.grid(which="major", alpha=0.3)
        axes.legend()
    figure.suptitle(
        f"All-reduce of {rows[0].type}, {about['ranks']} ranks on {about['cores']} cores "
        f"({about['processor']}), {about['mpi']}, {about['date']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=120)


HEADINGS = ("algorithm", "size", "count", "type", "op", "time", "algbw", "busbw", "#wrong")
UNITS = ("", "(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", "")
LINE = "{:>14} {:>11} {:>11} {:>8} {:>4} {:>11} {:>8} {:>8} {:>7}"


def main() -> None:
    """Measure size by size, print each row as it comes."""
    options = arguments()
    rr.init()
    about, is_printing = header(), rr.rank() == 0
    if is_printing:
        print("#", ", ".join(f"{key} {value}" for key, value in about.items()))
        print(f"# median of {options.runs} runs, the algorithms in turns; 1 GB = 1e9 bytes")
        print(LINE.format(*HEADINGS))
        print(LINE.format(*UNITS))
    rows: list[Row] = []
    compared = algorithms(options.dtype)
    for nbytes in sizes(options.min_bytes, options.max_bytes, options.factor):
        for row in measure(compared, nbytes, options.dtype, options.runs):
            rows.append(row)
            if is_printing:
                figures = [f"{row.time_us:.1f}", f"{row.algbw_gbs:.3f}", f"{row.busbw_gbs:.3f}"]
                print(LINE.format(*row[:5], *figures, row.wrong))
    if is_printing and options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"header": about, "rows": [row._asdict() for row in rows]}, file, indent=1)
    if is_printing and options.plot:
        plot(rows, about, options.plot)
    wrong = sum(row.wrong for row in rows)
    if wrong:
        sys.exit(f"bench/allreduce.py: {wrong} wrong elements")


if __name__ == "__main__":
    main()
