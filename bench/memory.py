"""The memory that a rank needs to average a model's gradients, beside what the same script has without communication.

    python bench/memory.py
    python bench/memory.py --ranks 8 --models gpt2 --json memory.json

Each row is a job of its own, since memory that was once taken is not always given back: five steps, float32. The rows:

    alone                  NumPy arrays, as many and as large as the model's gradients; nothing is communicated
    init()                 the same, and ringreduce.init()
    by name                allreduce_async_ with a name for each array, then synchronize all
    grouped                grouped_allreduce_ of all arrays
    MPI_Allreduce, packed  pack all arrays into one buffer, one MPI_Allreduce, unpack
    torch alone            a model of torch with these gradients, and SGD
    DistributedOptimizer   the same with ringreduce.torch.DistributedOptimizer
    DDP ring, DDP gloo     the same in DistributedDataParallel(model, gradient_as_bucket_view=True)

Columns, in 1e6 bytes of the rank that has most: private memory (`Private_*` in /proc/self/smaps), and how much more it
is than the script's alone; the host's memory in /dev/shm, divided by its ranks; how much higher the peak of resident
memory (VmHWM) is than the script's alone, pages counted that ranks share; wrong elements of the averages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import Column, Report, flag, main, package_version, run_job
from models import MODELS

TIMEOUT_S = 300
MB = 1e6
WORKER = str(Path(__file__).with_name("memory_worker.py"))
NUMPY = ("alone", "init()", "by name", "grouped", "MPI_Allreduce, packed")
TORCH = ("torch alone", "DistributedOptimizer", "DDP ring", "DDP gloo")
SILENT = (NUMPY[0], NUMPY[1], TORCH[0])
COLUMNS = (
    Column("model", "model", width=10, left=True),
    Column("who", "who", width=23, left=True),
    Column("ranks", "ranks", "", 6, "d"),
    Column("private_mb", "private", "MB", 10, ".1f"),
    Column("more_mb", "more", "MB", 10, ".1f"),
    Column("shared_mb", "shared", "MB", 10, ".1f"),
    Column("peak_mb", "peak", "MB more", 10, ".1f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
Job = dict[str, float]


def job(who: str, model: str, ranks: int) -> Job:
    """MB of private memory, of the peak, of shared memory for each rank; wrong elements."""
    with tempfile.TemporaryDirectory() as folder:
        run_job(["-np", str(ranks)], [WORKER, who, model, folder], TIMEOUT_S)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    shared = {file: nbytes for each in found for file, nbytes in each["shared"].items()}
    return {
        "private": max(each["private"] for each in found) / MB,
        "peak": max(each["peak"] for each in found) / MB,
        "shared": sum(shared.values()) / ranks / MB,
        "wrong": sum(each["wrong"] for each in found),
    }


def row(jobs: list[Job], alone: list[Job]) -> dict[str, Any]:
    """Medians; beside the medians of the script alone also job by job."""
    base, own = ({key: statistics.median(each[key] for each in of) for key in of[0]} for of in (alone, jobs))
    return {
        "private_mb": own["private"],
        "more_mb": own["private"] - base["private"],
        "more_runs_mb": [each["private"] - base["private"] for each in jobs],
        "shared_mb": own["shared"],
        "peak_mb": own["peak"] - base["peak"],
        "peak_runs_mb": [each["peak"] - base["peak"] for each in jobs],
    }


def bench(options: argparse.Namespace, report: Report) -> None:
    """Measure the rows of each kind after the script alone."""
    kinds = (NUMPY, TORCH) if package_version("torch") != "absent" else (NUMPY,)
    for model, ranks, names in itertools.product(options.models, options.ranks, kinds):
        alone: list[Job] = []
        for who in (each for each in names if each == names[0] or each in (options.only or names)):
            jobs = [job(who, model, ranks) for _ in range(options.runs)]
            alone = alone or jobs
            wrong = None if who in SILENT else sum(each["wrong"] for each in jobs)
            report.add({"model": model, "ranks": ranks, "who": who, **row(jobs, alone), "wrong": wrong})


if __name__ == "__main__":
    flags = [
        flag("--ranks", [2, 4], [2], metavar="N", help="how many in each job (2 4)"),
        flag("--models", ["resnet50"], ["tiny"], choices=MODELS, help="(resnet50)"),
        flag(
            "--only", None, nargs="+", choices=(*NUMPY, *TORCH), metavar="NAME", help="these rows, and the script alone"
        ),
    ]
    main("memory", __doc__, COLUMNS, bench, flags, runs=5, note="median of {runs} jobs, of the rank that has most")
