"""ringreduce on Spark: ranks on the machines that Spark has.

    losses = ringreduce.spark.run(train, args=(0.1,), num_proc=8)                            ranks beside its tasks
    rows = df.mapInArrow(ringreduce.spark.rank(train), schema, barrier=True)                 ranks that are its tasks

Nothing of Spark is imported before a function here is called.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ringreduce.api import joined
from ringreduce.errors import InputError, MissingExtraError
from ringreduce.transport import joining
from ringrun import lending

__all__ = ["rank", "run", "run_elastic"]

_LEAVE_S = 10.0
_NAMES = {"np": "num_proc=", "elastic": "run_elastic()"} | {
    f"{limit}_{name}": f"run_elastic({limit}_num_proc=)" for limit in ("min", "max") for name in ("np", "num_proc")
}
_JAVA_FRAMES = re.compile(r"^\tat .*\n?", re.MULTILINE)


def run(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    env: Mapping[str, str] | None = None,
    spark: Any = None,
    **flags: Any,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on each of `num_proc` ranks on Spark's executors; returns the results, by rank.

    num_proc:      how many ranks, by default spark.default.parallelism; a task of a barrier stage holds the cores, and
                   the GPUs, of each.
    start_timeout: how many seconds the tasks may take to begin (60).
    env:           variables for the ranks.
    spark:         the SparkSession, by default the active one.
    flags:         ringrun's, as of `ringreduce.run`.

    Each rank is a process beside a Python worker of Spark's, with that one's Python, folder, import path and variables.

    Raises: JobFailedError when a rank fails, with ringrun's report; StartupError when tasks cannot run ranks;
            InputError; KeyboardInterrupt once all ranks have ended; MissingExtraError without PySpark.
    Source: horovod.spark.run.

    >>> losses = run(train, args=(0.1,), num_proc=8)                                                   # doctest: +SKIP
    """
    return _run("run", fn, args, kwargs, num_proc, None, start_timeout, env, spark, flags)


def run_elastic(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    *,
    env: Mapping[str, str] | None = None,
    spark: Any = None,
    **flags: Any,
) -> list[Any]:
    """Do what `run` does in an elastic job, which continues without ranks that fail; returns the others' results.

    min_num_proc: with fewer ranks the job ends (1).
    max_num_proc: how many ranks it may have; executors that come later are used from the next commit on (num_proc).

    A task whose executor is lost is started again by Spark, up to spark.task.maxFailures times, and lends its slot; the
    others go on whatever becomes of it.

    Source: horovod.spark.run_elastic.

    >>> losses = run_elastic(train, num_proc=8, min_num_proc=2)                                        # doctest: +SKIP
    """
    limits = {"min_np": min_num_proc, "max_np": max_num_proc}
    return _run("run_elastic", fn, args, kwargs, num_proc, limits, start_timeout, env, spark, flags)


def _run(
    name: str,
    fn: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any] | None,
    num_proc: int | None,
    limits: Mapping[str, Any] | None,
    start_timeout: float | None,
    env: Mapping[str, str] | None,
    spark: Any,
    flags: Mapping[str, Any],
) -> list[Any]:
    where, pyspark = f"ringreduce.spark.{name}()", _pyspark()
    spark = spark or pyspark.sql.SparkSession.getActiveSession()
    if spark is None:
        raise InputError(f"{where}: there is no active SparkSession; make one, or pass spark=")
    context = spark.sparkContext
    np = context.defaultParallelism if num_proc is None else num_proc
    elastic, call = limits is not None, lending.call_of(where, fn, args, kwargs)
    np, asked = lending.checked(where, np, limits or {}, elastic, flags, _NAMES)
    ticket, group = lending.ticket(start_timeout or 60.0), f"ringreduce-{uuid.uuid4().hex}"
    most = asked.get("max_np", np)
    failed: list[str] = []

    def lend(_: Iterator[int]) -> Iterator[str]:
        from pyspark import TaskContext

        task = TaskContext.get()
        of_task = task.resources() if task else {}
        yield lending.lend(ticket, gpus=",".join(of_task["gpu"].addresses) if "gpu" in of_task else None)

    def stage(tasks: int) -> None:
        try:
            context.setJobGroup(group, f"ringreduce: {most} ranks", interruptOnCancel=True)
            slots = context.parallelize(range(tasks), tasks)
            (slots if elastic else slots.barrier()).mapPartitions(lend).collect()
        except BaseException as error:
            failed.append(_JAVA_FRAMES.sub("", str(error)))

    # Spark ends a stage whose task has failed too often: tasks that are to go on without it are each a stage
    counts = [1] * most if elastic else [most]
    stages: list[Any] = []

    def trouble() -> str:
        if not stages:
            stages.extend(pyspark.InheritableThread(target=stage, args=(tasks,), daemon=True) for tasks in counts)
            for each in stages:
                each.start()
        return failed[0] if len(failed) == len(stages) else ""

    try:
        results: list[Any] = lending.run(call, ticket, np, asked, env or {}, trouble)
        return results
    finally:
        _join(stages, 1.0)
        if any(each.is_alive() for each in stages):  # else Spark warns that there is nothing to cancel
            context.cancelJobGroup(group)
            _join(stages, _LEAVE_S)


def _pyspark() -> Any:
    """The module PySpark; raises MissingExtraError where it is not installed."""
    try:
        import pyspark
        from pyspark import sql  # noqa: F401 - a folder of that name has none
    except ImportError as error:
        raise MissingExtraError.of("ringreduce.spark needs PySpark", "pyspark", error) from error
    return pyspark


def _join(threads: Sequence[Any], timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    for each in threads:
        each.join(max(0.0, until_s - time.monotonic()))


def rank(fn: Callable[[Iterator[Any]], Iterable[Any]]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Make each task of a barrier stage a rank; its partition is the data, what it yields becomes rows of the result.

        rows = df.mapInArrow(ringreduce.spark.rank(train), "loss double", barrier=True).collect()

    fn: gets the partition's batches, and yields batches, as mapInArrow and mapInPandas have them.
    Needs MPICH on several hosts, and as many slots as there are partitions. `ringreduce.init()` has been called when
    `fn` begins, and `shutdown()` is when it ends. A failing task ends the stage, as with any barrier stage.
    Spark keeps its Python processes for a minute, and MPI starts once in a process: the same ones can be ranks again,
    with ranks that need not be the partitions' numbers, but not some of them together with others: then StartupError
    says so, and the setting spark.python.worker.reuse=false gives each stage new ones.
    """

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        context = _pyspark().BarrierTaskContext.get()
        number, size = context.partitionId(), len(context.getTaskInfos())
        said = [json.loads(each) for each in context.allGather(json.dumps([number, joined.membership()]))]
        before = [each and joined.Membership(*each) for _, each in sorted(said, key=lambda each: each[0])]
        ranks = joined.ranks_again(before, "set spark.python.worker.reuse=false")
        address = ""
        if ranks is None:
            address = next(filter(None, context.allGather("" if number else joining.start(size))))
        with joined.rank_of(address, ranks[number] if ranks else number, size, "Spark"):
            yield from fn(batches)

    return run
