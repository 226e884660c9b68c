"""How much of the GPU's memory bandwidth our kernels reach: beside a plain copy that moves as many bytes.

    python bench/gpu/kernels.py                                                              # alone, on one GPU
    python bench/gpu/kernels.py --sizes 1048576 67108864 --json kernels.json

Rows, for each size of a slot, float32 and float16:

    gather       64 tensors into a slot
    reduce P     the same elements of P slots into one, summed as an all-reduce over P ranks sums its chunk
    scatter      64 tensors out of the 4 slots of an all-reduce over 4 ranks, each chunk from its owner's
    copy         cudaMemcpyAsync from device to device, beside each, moving as many bytes

Columns: the bytes that are read and written (a copy of n bytes moves 2 n, a sum of P slots P + 1); the time of a call,
by CUDA events, median of several runs in turns with its copy; bytes over time; the copy's time over ours in percent;
elements that are wrong, checked before anything is timed. Calls are queued while the stream is held up, so what is
timed is the GPU and not Python. The bar: 80 % of the copy from slots of 64 MiB on; shorter ones may stay in a cache.

Memory: about 22 times the largest size; sizes that do not fit are left out, and named. Skipped, with the reason and
exit code 0, without a GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/, for what all benches share

import numpy as np
from common import Column, Report, machine, microseconds, parse, parser
from gpus import about_gpu, finish, hold, why_not

import ringreduce as rr
from ringreduce.arrays.dtypes import element_type
from ringreduce.collectives.ops import Reduction

SIZES = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]
DTYPES = ("float32", "float16")
SOURCES = (2, 4, 8)
TENSORS, RANKS = 64, 4
CALLS = 10
LONGEST_HOLD_MS = 200
BAR_PERCENT, BAR_FROM = 80, 64 << 20
BLOCKS = 22
"""Memory, in sizes of a slot: 8 sources, a target, the tensors, 4.5 for the longest copy; and more for the checks."""
COLUMNS = (
    Column("size", "size", "B", 11, "d"),
    Column("type", "type", "", 9),
    Column("who", "  who", width=11, left=True),
    Column("moved", "moved", "B", 12, "d"),
    Column("time_us", "time", "us", 10, ".1f"),
    Column("gbs", "bandwidth", "GB/s", 10, ".1f"),
    Column("copy_us", "copy", "us", 10, ".1f"),
    Column("of_copy_percent", "of copy", "%", 9, ".1f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__, runs=9)
    made.add_argument("--sizes", nargs="+", type=int, default=None, metavar="N", help="bytes (1 MiB to 1 GiB)")
    options = parse(made)
    options.sizes = options.sizes or (SIZES[:1] if options.quick else SIZES)
    if any(size < 1 << 16 or size % (1 << 16) for size in options.sizes):
        made.error("expected --sizes that are multiples of 65536")
    return options


class Slots:
    """The memory of one size and type: 8 slots of known elements, a target, a slot's tensors, and room for a copy."""

    def __init__(self, kernels: Any, stream: Any, size: int, dtype: str) -> None:
        import cupy

        self.kernels, self.stream = kernels, stream
        self.element = element_type(dtype)
        self.count = size // self.element.itemsize
        self.size = size
        most = max(SOURCES)
        self.memory = cupy.zeros((most + 2, self.count), dtype)
        for k in range(most):
            self.memory[k] = (cupy.arange(self.count, dtype=np.int32) + 7 * k) % 61
        self.sources, self.target, self.tensors = self.memory[:most], self.memory[most], self.memory[most + 1]
        self.spare = cupy.zeros((most + 1) * size // 2, np.uint8)
        self.slots, self.to = [address(source) for source in self.sources], address(self.target)
        self.sums = {sources: Reduction(rr.Sum, self.element, sources) for sources in SOURCES}
        length = self.count // TENSORS
        starts = [k * length for k in range(TENSORS)]
        self.pointers = [address(self.tensors) + start * self.element.itemsize for start in starts]
        finish()  # what is above was queued on CuPy's own stream
        self.table = kernels.table(starts, [length] * TENSORS, self.element.itemsize, stream)

    def gather(self) -> None:
        """The tensors into the target."""
        self.kernels.gather(self.table, self.pointers, self.to, self.stream)

    def scatter(self) -> None:
        """The tensors out of the slots of 4 ranks."""
        self.kernels.scatter(self.table, self.slots[:RANKS], self.count // RANKS, self.pointers, self.stream)

    def reduce(self, sources: int) -> None:
        """The first slots into the target."""
        self.kernels.reduce(self.sums[sources], self.slots[:sources], self.to, self.count, self.stream)

    def copy(self, moved: int) -> None:
        """A copy that reads and writes so many bytes together."""
        self.stream.copy(address(self.spare), address(self.memory), moved // 2)

    def rivals(self) -> Iterator[Rival]:
        """What is timed. Small whole numbers have exact sums, in whatever type."""
        yield Rival("gather", self.gather, 2 * self.size, self.wrong_gather)
        for count in SOURCES:
            call, wrong = functools.partial(self.reduce, count), functools.partial(self.wrong_sum, count)
            yield Rival(f"reduce {count}", call, (count + 1) * self.size, wrong)
        yield Rival("scatter", self.scatter, 2 * self.size, self.wrong_scatter)

    def wrong_gather(self) -> int:
        """The slot must be the tensors, one after the other."""
        self.tensors[...] = self.sources[3]
        return self._differing(self.gather, self.target, self.sources[3])

    def wrong_scatter(self) -> int:
        """Chunk k must be that of slot k."""
        import cupy

        chunks = [slice(k * self.count // RANKS, (k + 1) * self.count // RANKS) for k in range(RANKS)]
        expected = cupy.concatenate([self.sources[k, chunk] for k, chunk in enumerate(chunks)])
        return self._differing(self.scatter, self.tensors, expected)

    def wrong_sum(self, count: int) -> int:
        """Element by element."""
        expected = sum(self.sources[k].astype(np.float32) for k in range(count))
        return self._differing(functools.partial(self.reduce, count), self.target, expected)

    def _differing(self, call: Callable[[], None], result: Any, expected: Any) -> int:
        result.fill(-1)  # which no element is
        finish()
        call()
        finish()
        return int((result != expected).sum())


class Rival(NamedTuple):
    """One of our kernels."""

    name: str
    call: Callable[[], None]
    moved: int
    """Bytes that it reads and writes."""
    wrong: Callable[[], int]
    """How many elements are wrong after one call."""


def address(array: Any) -> int:
    """Where an array lies on the GPU."""
    return int(array.data.ptr)


def seconds_per_call(call: Callable[[], None], stream: Any) -> float:
    """On the GPU, between two events, the calls one after the other. They are queued while the stream is held up."""
    import cupy

    begin = time.perf_counter()
    call()
    host_ms = (time.perf_counter() - begin) * 1e3
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    with stream:
        hold(min(LONGEST_HOLD_MS, 1 + 2 * CALLS * host_ms))
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3 / CALLS


def rows(slots: Slots, runs: int) -> Iterator[dict[str, Any]]:
    """Check each kernel, then time it in turns with its copy; who begins changes from run to run."""
    for rival in slots.rivals():
        wrong = rival.wrong()
        copy = functools.partial(slots.copy, rival.moved)
        seconds_per_call(rival.call, slots.stream), seconds_per_call(copy, slots.stream)  # warm
        ours: list[float] = []
        copies: list[float] = []
        for run in range(runs):
            for call, times in ((rival.call, ours), (copy, copies))[:: -1 if run % 2 else 1]:
                times.append(seconds_per_call(call, slots.stream))
        found, beside = microseconds(ours), statistics.median(copies) * 1e6
        yield {
            "size": slots.size,
            "type": slots.element.name,
            "who": f"  {rival.name}",
            "moved": rival.moved,
            **found,
            "gbs": rival.moved / found["time_us"] / 1e3,
            "copy_us": beside,
            "copy_runs_us": microseconds(copies)["runs_us"],
            "of_copy_percent": 100 * beside / found["time_us"],
            "wrong": wrong,
        }


def verdict(found: Sequence[dict[str, Any]]) -> str:
    """Whether the bar was reached, and by what it was missed."""
    judged = [row for row in found if row["size"] >= BAR_FROM]
    missed = [row for row in judged if row["of_copy_percent"] < BAR_PERCENT]
    bar = f"bar: {BAR_PERCENT} % of the copy from {BAR_FROM >> 20} MiB on"
    if not judged:
        return f"{bar}: nothing of that size was measured"
    which = ", ".join(f"{r['who'].strip()} {r['type']} {r['size']} B {r['of_copy_percent']:.1f} %" for r in missed)
    return f"{bar}: missed by {which}" if missed else f"{bar}: reached by all {len(judged)}"


def main() -> None:
    """Size by size."""
    options = arguments()
    if reason := why_not():
        print(f"bench/gpu/kernels.py: skipped: {reason}")
        return
    import cupy

    from ringreduce.arrays.cuda import Stream, device
    from ringreduce.gpu.kernels import Kernels

    gpu = device(cupy.cuda.Device().id)
    kernels, stream = Kernels(gpu), Stream(gpu)
    note = f"median of {options.runs} runs of {CALLS} calls, each in turns with its copy; 1 GB = 1e9 bytes"
    report = Report("gpu/kernels", {**about_gpu(), **machine()}, COLUMNS, True, note)
    for size in options.sizes:
        if size * BLOCKS > cupy.cuda.runtime.memGetInfo()[0]:
            report.say(f"# {size} B: left out, there is too little free memory on the GPU")
            continue
        for dtype in DTYPES:
            for row in rows(Slots(kernels, stream, size, dtype), options.runs):
                report.add(row)
            cupy.get_default_memory_pool().free_all_blocks()
    report.header["notes"] = [verdict(report.rows)]
    report.say(f"# {verdict(report.rows)}")
    report.finish(options)


if __name__ == "__main__":
    main()
