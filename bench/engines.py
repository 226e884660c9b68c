"""What it costs to start ranks where an engine has the processes: Dask, Ray, Spark, torchrun.

    python bench/engines.py                              # a minute or two
    python bench/engines.py --who dask torchrun

For each engine three rows, in turns, after one round that is not timed:

    ringreduce.run    so many ranks on this machine, without the engine
    its own tasks     as many of the engine's tasks, which do nothing
    run               ringreduce.dask.run, ringreduce.ray.run or ringreduce.spark.run
                      `more`: than both together, which it has to do, too: the goal is 2 s

and for torchrun one:

    first all-reduce  from the imports, of torch and ringreduce, to its end on the slowest rank: the goal is 1 s

`#wrong`: ranks that did not get the sum. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from common import Column, Report, flag, main, run_command

import ringreduce as rr

TIMEOUT_S = 300
COLUMNS = (
    Column("engine", "engine", width=10, left=True),
    Column("who", "who", width=16, left=True),
    Column("time_s", "time", "s", 8, ".2f"),
    Column("more_s", "more", "s", 8, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
Starts = tuple[Callable[[], object], Callable[[], list[float]]]


def work() -> float:
    """A rank."""
    rr.init()
    return float(rr.allreduce(rr.rank() + 1.0, op=rr.Sum))


@contextlib.contextmanager
def dask(size: int) -> Iterator[Starts]:
    """A worker for each rank."""
    from distributed import Client, LocalCluster

    import ringreduce.dask

    one = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.CRITICAL}
    with LocalCluster(n_workers=size, **one) as cluster, Client(cluster) as client:
        yield (
            lambda: client.gather(client.map(abs, range(size), pure=False)),
            lambda: ringreduce.dask.run(work, client=client),
        )


@contextlib.contextmanager
def ray(size: int) -> Iterator[Starts]:
    """A CPU for each rank."""
    import ray

    import ringreduce.ray

    ray.init(address="local", num_cpus=size, include_dashboard=False, log_to_driver=False)
    task = ray.remote(lambda number: number)
    try:
        yield (
            lambda: ray.get([task.remote(number) for number in range(size)]),
            lambda: ringreduce.ray.run(work, np=size),
        )
    finally:
        ray.shutdown()


@contextlib.contextmanager
def spark(size: int) -> Iterator[Starts]:
    """A core for each rank, and a barrier stage."""
    from pyspark.sql import SparkSession

    import ringreduce.spark

    made = SparkSession.builder.master(f"local[{size}]").config("spark.ui.enabled", "false")
    session = made.config("spark.ui.showConsoleProgress", "false").config("spark.log.level", "ERROR").getOrCreate()
    context = session.sparkContext
    try:
        yield (
            lambda: context.parallelize(range(size), size).barrier().mapPartitions(list).collect(),
            lambda: ringreduce.spark.run(work, num_proc=size),
        )
    finally:
        session.stop()


ENGINES = {"dask": ("distributed", dask), "ray": ("ray", ray), "spark": ("pyspark", spark)}


def torchrun(size: int) -> list[tuple[float, float]]:
    """Of each rank, the seconds and the sum."""
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    printed = run_command([sys.executable, *started, __file__, "--worker"], TIMEOUT_S)
    return [tuple(json.loads(line)) for line in printed.splitlines() if line.startswith("[")]


def be_rank(_: argparse.Namespace) -> None:
    """One of torchrun's ranks."""
    import torch  # noqa: F401 - a program of torchrun's has it

    began_s = time.perf_counter()
    total = work()
    took_s = time.perf_counter() - began_s
    print(f"{json.dumps([took_s, total])}\n", end="", flush=True)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it returns."""
    began_s = time.perf_counter()
    found = call()
    return time.perf_counter() - began_s, found


def bench(options: argparse.Namespace, report: Report) -> None:
    """Engine by engine."""
    size = options.ranks
    total = size * (size + 1) / 2

    def wrong(sums: list[float]) -> int:
        return size - sum(each == total for each in sums)

    for engine in options.who:
        if engine == "torchrun":
            runs = [torchrun(size) for _ in range(options.runs)]
            time_s = statistics.median(max(each for each, _ in ranks) for ranks in runs)
            found = sum(wrong([value for _, value in ranks]) for ranks in runs)
            report.add({"engine": engine, "who": "first all-reduce", "time_s": time_s, "wrong": found})
            continue
        package, make = ENGINES[engine]
        if importlib.util.find_spec(package) is None:
            report.say(f"# {engine} is not installed")
            continue
        with make(size) as (own, ours):
            calls = {"ringreduce.run": lambda: rr.run(work, np=size), "its own tasks": own, "run": ours}
            rounds = [{who: timed(call) for who, call in calls.items()} for _ in range(options.runs + 1)][1:]
        medians = {who: statistics.median(each[who][0] for each in rounds) for who in calls}
        for who, time_s in medians.items():
            row = {"engine": engine, "who": who, "time_s": time_s}
            if who == "run":
                row["more_s"] = time_s - medians["ringreduce.run"] - medians["its own tasks"]
            row["wrong"] = None if who == "its own tasks" else sum(wrong(each[who][1]) for each in rounds)
            report.add(row)


if __name__ == "__main__":
    ranks = flag("--ranks", 2, metavar="N", help="of each (2)")
    who = flag("--who", [*ENGINES, "torchrun"], choices=[*ENGINES, "torchrun"], help="engines (all)")
    worker = flag("--worker", False, help=argparse.SUPPRESS)
    note = "median of {runs} runs, the rows of an engine in turns"
    main("engines", __doc__, COLUMNS, bench, [ranks, who, worker], runs=3, note=note, worker=be_rank)
