"""The gradients of whole models on GPUs: ours by its paths, beside MPI on the same memory, and the naive way.

    ringrun -np 2 python bench/gpu/gradients.py                                 # one GPU a rank, or all on one
    ringrun -np 4 python bench/gpu/gradients.py --models resnet50 --json gradients.json

Every rank has all gradients of a model (`bench/models.py`) on its GPU, float32, and all get the average. The rows:

    ringreduce, CuPy           as chosen; allreduce_async_ with a name for every tensor, then synchronize all
    ringreduce, torch          the same through ringreduce.torch, where torch has CUDA
    ringreduce, ipc            CuPy, with RINGREDUCE_CUDA_NCCL=0, where NCCL is what is chosen
    ringreduce, host_staged    CuPy, with RINGREDUCE_CUDA_{NCCL,IPC,AWARE_MPI}=0: through the host's memory
    MPI_Allreduce, packed      a sum of one buffer in GPU memory, where MPI says that it takes such; packing and
                               dividing are not counted
    naive                      tensor by tensor: copy down, MPI_Allreduce, divide, copy up

Each row is a world of its own, with settings of its own: all are formed and left in turns, in the same processes. A
call is done when the GPU is. Columns: time of all tensors together (median of several runs, of the slowest rank); how
often faster than the naive way; how often the time of `ringreduce, CuPy`; elements that differ from the average, or the
sum, computed apart. Below: the path that ringreduce took, as info() says. The bar: ringreduce as chosen is 5 times
faster than the naive way.

Skipped, with the reason and exit code 0, where a rank has no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/, for what all benches share

import numpy as np
from common import (
    MAX_CALLS,
    Column,
    Report,
    about,
    is_printing,
    microseconds,
    neutral,
    parser,
    seconds_per_call,
    seconds_per_run,
    total,
)
from gpus import about_gpu, finish, place, why_not
from models import MODELS, Shape
from reducers import Gradients, Reducer, arguments, ours

import ringreduce as rr

SECONDS_PER_RUN = 0.3
WARM_UP_CALLS = 2
BAR_TIMES = 5
OURS, NAIVE = "ringreduce, CuPy", "naive"
COLUMNS = (
    Column("model", "model", width=10, left=True),
    Column("who", "who", width=23, left=True),
    Column("tensors", "tensors", "", 8, "d"),
    Column("mb", "size", "MB", 8, ".1f"),
    Column("time_ms", "time", "ms", 9, ".2f"),
    Column("algbw_gbs", "algbw", "GB/s", 8, ".2f"),
    Column("of_naive", "faster", "than naive", 14, ".2f"),
    Column("of_ours", "of ours", "times", 10, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


class GpuGradients(Gradients):
    """The gradients of a model in GPU memory, each with memory of its own; `arrays` are what they are filled from."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.tensors: list[Any] = []
        super().__init__(shapes)
        import cupy

        self.tensors = [cupy.asarray(array) for array in self.arrays]

    def fill(self) -> None:
        """Known data, on the host and on the GPU."""
        super().fill()
        for tensor, array in zip(self.tensors, self.arrays, strict=False):
            tensor.set(array)
        finish()

    def results(self) -> list[np.ndarray[Any, Any]]:
        """What is on the GPU."""
        return [tensor.get() for tensor in self.tensors]


class Contender(NamedTuple):
    """One row: who reduces, and the settings of the world in which it does."""

    reducer: Callable[[GpuGradients], Reducer]
    variables: dict[str, str]


def done(run: Callable[[], object]) -> Callable[[], None]:
    """The same, over when the GPU is done."""

    def whole() -> None:
        run()
        finish()

    return whole


def with_cupy(gradients: GpuGradients) -> Reducer:
    """Ours, on CuPy arrays."""
    return Reducer(done(ours(gradients, rr, gradients.tensors).run), gradients.results)


def with_torch(gradients: GpuGradients) -> Reducer:
    """Ours, on torch tensors in the same memory."""
    import torch

    import ringreduce.torch as rrt

    tensors = [torch.from_dlpack(tensor) for tensor in gradients.tensors]
    return Reducer(done(ours(gradients, rrt, tensors).run), gradients.results)


def packed(gradients: GpuGradients) -> Reducer:
    """One MPI_Allreduce of one buffer in GPU memory."""
    import cupy
    from mpi4py import MPI

    buffer = cupy.asarray(gradients.packed)
    counts = np.cumsum([array.size for array in gradients.arrays])[:-1]

    def results() -> list[np.ndarray[Any, Any]]:
        buffer.set(gradients.packed)
        finish()
        neutral().Allreduce(MPI.IN_PLACE, buffer)
        return np.split(buffer.get(), counts)

    return Reducer(done(lambda: neutral().Allreduce(MPI.IN_PLACE, buffer)), results, averages=False)


def naive(gradients: GpuGradients) -> Reducer:
    """What one writes without a library."""
    import cupy
    from mpi4py import MPI

    def run() -> None:
        for tensor in gradients.tensors:
            host = cupy.asnumpy(tensor)
            neutral().Allreduce(MPI.IN_PLACE, host)
            host /= neutral().size
            tensor.set(host)

    return Reducer(done(run), gradients.results)


def contenders() -> tuple[dict[str, Contender], list[str]]:
    """All that can be measured on all ranks here, and why the others cannot."""
    no_nccl = {"RINGREDUCE_CUDA_NCCL": "0"}
    staged = {**no_nccl, "RINGREDUCE_CUDA_IPC": "0", "RINGREDUCE_CUDA_AWARE_MPI": "0"}
    found = {
        OURS: Contender(with_cupy, {}),
        "ringreduce, torch": Contender(with_torch, {}),
        "ringreduce, ipc": Contender(with_cupy, no_nccl),
        "ringreduce, host_staged": Contender(with_cupy, staged),
        "MPI_Allreduce, packed": Contender(packed, {}),
        NAIVE: Contender(naive, {}),
    }
    reasons = {"ringreduce, torch": torch_why_not(), "ringreduce, ipc": nccl_why_not()}
    reasons["MPI_Allreduce, packed"] = mpi_why_not()
    everyones = {name: next(filter(None, neutral().allgather(reason)), "") for name, reason in reasons.items()}
    left_out = [f"{name}: {reason}" for name, reason in everyones.items() if reason]
    return {name: each for name, each in found.items() if not everyones.get(name)}, left_out


def torch_why_not() -> str:
    """Why torch has no place here; empty where it has."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return "" if torch.cuda.is_available() else f"torch {torch.__version__} finds no GPU"


def nccl_why_not() -> str:
    """Why NCCL is not what is chosen, so that ipc needs no row of its own; empty where it is."""
    places = neutral().allgather((os.uname().nodename, place()))
    if len(set(places)) < len(places):
        return "it is what is chosen, since ranks share a GPU, which NCCL refuses"
    return "" if rr.nccl_built() else "it is what is chosen, since CuPy has no NCCL"


def mpi_why_not() -> str:
    """Why MPI cannot be given GPU memory; empty where it says that it can."""
    from ringreduce.gpu.cuda_aware import declared

    can, reason = declared()
    return "" if can else reason


def in_world(contender: Contender, work: Callable[[], Any]) -> Any:
    """Form a world with these settings, work, leave it."""
    os.environ.update(contender.variables)
    rr.init()
    try:
        return work()
    finally:
        rr.shutdown()
        for name in contender.variables:
            del os.environ[name]


def calls_for(reducer: Reducer, seconds: float) -> int:
    """Warm up, and say how many calls fill a run; the same on all ranks, since the slowest one's time counts."""
    times = [seconds_per_call(reducer.run, 1) for _ in range(WARM_UP_CALLS)]
    return max(1, min(MAX_CALLS, int(seconds / times[-1])))


def measured(
    gradients: GpuGradients, compared: dict[str, Contender], runs: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """The times of all, a world for each and each run, in turns; then the checks."""
    reducers = {name: contender.reducer(gradients) for name, contender in compared.items()}
    times: dict[str, list[float]] = {name: [] for name in compared}
    names = list(compared)

    paths: dict[str, str] = {}

    def turn(name: str) -> float:
        reducer = reducers[name]
        time = seconds_per_call(reducer.run, calls_for(reducer, seconds))
        if name.startswith("ringreduce"):
            paths[name] = rr.info().gpu_algorithm
        return time

    for run in range(runs):
        first = run % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(in_world(compared[name], functools.partial(turn, name)))
    found = {name: microseconds(each) for name, each in times.items()}
    for name, row in found.items():
        check = functools.partial(gradients.wrong, reducers[name])
        row["wrong"] = total(in_world(compared[name], check))
        row["path"] = paths.get(name)
    return found


def rows(model: str, gradients: GpuGradients, found: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    for name, row in found.items():
        yield {
            "model": model,
            "tensors": len(gradients.tensors),
            "mb": gradients.nbytes / 1e6,
            "who": name,
            "time_ms": row["time_us"] / 1e3,
            "algbw_gbs": gradients.nbytes / row["time_us"] / 1e3,
            "of_naive": found[NAIVE]["time_us"] / row["time_us"],
            "of_ours": row["time_us"] / found[OURS]["time_us"],
            **row,
        }


def verdict(found: Sequence[dict[str, Any]]) -> str:
    """Whether the bar was reached."""
    reached = {row["model"]: row["of_naive"] for row in found if row["who"] == OURS}
    judged = ", ".join(
        f"{model} {times:.1f} ({'reached' if times >= BAR_TIMES else 'missed'})" for model, times in reached.items()
    )
    return f"bar: {OURS} is {BAR_TIMES} times faster than the naive way: {judged}"


def main() -> None:
    """Measure model by model."""
    options = arguments(parser(__doc__, runs=5))
    reason = next(filter(None, neutral().allgather(why_not())), "")
    if reason:
        if is_printing():
            print(f"bench/gpu/gradients.py: skipped: {reason}")
        return
    torch_why_not()  # init() chooses each rank's GPU in the libraries that are there
    rr.init()
    hosts, places = len(set(rr.info().hosts)), neutral().allgather((os.uname().nodename, place()))
    compared, left_out = contenders()
    rr.shutdown()
    header = {**about_gpu(), "gpus": len(set(places)), **about(hosts=hosts)}
    skipped = "".join(f"; left out: {each}" for each in left_out)
    note = f"median of {options.runs} runs, the rows in turns, of the slowest rank; 1 MB = 1e6 bytes{skipped}"
    report = Report("gpu/gradients", header, COLUMNS, is_printing(), note)
    for model in options.models:
        gradients = GpuGradients(MODELS[model]())
        found = measured(gradients, compared, options.runs, seconds_per_run(options, SECONDS_PER_RUN))
        for row in rows(model, gradients, found):
            report.add(row)
    paths = {row["who"]: row["path"] for row in report.rows if row["path"]}
    report.header["notes"] = [
        verdict(report.rows),
        *(f"{name}: {path}" for name, path in paths.items()),
        *(f"left out: {each}" for each in left_out),
    ]
    for each in report.header["notes"][: 1 + len(paths)]:
        report.say(f"# {each}")
    report.finish(options)


if __name__ == "__main__":
    main()
