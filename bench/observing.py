"""What it costs to record steps, as `ringrun --report` does, and to check them, as `--check`: a training step with and
without, in turns; and recording by calls.

    ringrun -np 2 python bench/observing.py
    ringrun -np 4 python bench/observing.py --batches 4 --json observing.json

The model and the step of bench/train_step.py, with `ringreduce.torch.DistributedOptimizer`. Rows: not recorded; steps
recorded and reported to ringrun; checked for NaN; compared every 10th step, where the default is 100. Columns: time of
a step (median of several runs, of the slowest rank), and how much longer it is than without (median of the runs' own
values). Noise of the machine is larger than what is looked for, so below stands what each thing that recording does
takes alone, and what that makes of a step, were nothing of it hidden.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import operator
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
from common import (
    Action,
    Column,
    Report,
    flag,
    in_turns,
    main,
    microseconds,
    seconds_per_call,
    seconds_per_run,
)
from train_step import SECONDS_PER_RUN, WARM_UP_STEPS, Trainee, batch_of, new_model, optimizer_of

import ringreduce as rr
from ringreduce import runtime
from ringreduce.execution.steps import StepRecorder
from ringreduce.monitor import reporting
from ringreduce.monitor.reporting import SAMPLE_S, TOTALS_S, Reporting

OFF, ON = "not recorded", "recorded, reported"
CHECKS = {"check nan": "nan", "check divergence:10": "divergence:10"}
COLUMNS = (
    Column("batch", "batch", "", 6, "d"),
    Column("who", "  who", width=20, left=True),
    Column("time_ms", "time", "ms", 9, ".3f"),
    Column("overhead_percent", "overhead", "%", 9, ".2f"),
)


@contextlib.contextmanager
def recorded() -> Iterator[Reporting]:
    """In it this rank's steps are recorded and reported, as with RINGREDUCE_REPORT=1."""
    engine = runtime.current("observing").engine
    algorithms, fusion_bytes = engine.states[0].algorithms, engine.fusion_buffer.total_bytes
    engine.record(always=False)
    about = reporting.about(engine.host, engine.settings, algorithms, 0.0)
    of = engine.recorder, engine.transport, engine.host, about, algorithms, fusion_bytes
    made = Reporting(*of, for_s=3600.0)
    try:
        yield made
    finally:
        made._ending.set()
        made._thread.join()
        engine.recorder.stop()
        engine.transport.traffic = None


@contextlib.contextmanager
def checked(text: str) -> Iterator[None]:
    """In it steps are checked, on all ranks."""
    rr.check(text)
    try:
        yield
    finally:
        rr.check("")


class Inside:
    """What is done inside a context."""

    def __init__(self, action: Action, context: Callable[[], AbstractContextManager[object]]) -> None:
        self.action, self.context = action, context

    def __call__(self) -> object:
        """Do it."""
        return self.action()


def timer(action: Action, calls: int) -> float:
    """Of a turn."""
    with action.context() if isinstance(action, Inside) else contextlib.nullcontext():
        return seconds_per_call(action, calls)


def microseconds_each(action: Action, calls: int = 200, before: Action = lambda: None) -> float:
    """The fastest of ten times so many calls.  before: each time."""

    def once() -> float:
        before()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        return (time.perf_counter() - start) / calls * 1e6

    return min(once() for _ in range(10))


def of_a_step(step: Action, report: Report, step_s: float) -> None:
    """What each part takes, and how much of a step that makes."""
    operation, scratch = rr.allreduce_async(np.ones(10)), StepRecorder()
    operation.wait()
    scratch.start()
    stepped = functools.partial(scratch.stepped, 1)
    with recorded() as made:
        for _ in range(3):
            step()
        last = made._recorder.steps[-1]
        parts = {
            "an operation": (microseconds_each(lambda: scratch.ended(operation), before=stepped), last.count),
            "a wait": (
                microseconds_each(lambda: scratch.waited("w", time.monotonic()), before=stepped),
                len(last.waits),
            ),
            "the end of a step": (microseconds_each(stepped), 1),
            "a look at the script": (microseconds_each(made._sampler.look), step_s / statistics.mean(SAMPLE_S)),
            "a report": (microseconds_each(made._send_totals, 20), step_s / TOTALS_S),
        }
    for name, (each_us, count) in parts.items():
        report.say(f"# {name}: {each_us:.1f} us, {count:.2f} in a step")
    share = sum(each_us * count for each_us, count in parts.values()) / (step_s * 1e6)
    report.say(f"# together {100 * share:.3f} % of a step of {1e3 * step_s:.1f} ms")


def bench(options: argparse.Namespace, report: Report) -> None:
    """Measure batch by batch."""
    import ringreduce.torch as rrt

    for number in options.batches:
        model = new_model(options.quick)
        batch = batch_of(number, model.position.num_embeddings)
        trainee = Trainee(model, rrt.DistributedOptimizer(optimizer_of(model), model.named_parameters()))
        for _ in range(WARM_UP_STEPS):
            trainee.step(*batch)
        step = lambda trainee=trainee, batch=batch: trainee.step(*batch)  # noqa: E731
        others = {name: Inside(step, functools.partial(checked, text)) for name, text in CHECKS.items()}
        seconds = seconds_per_run(options, SECONDS_PER_RUN)
        times = in_turns({OFF: step, ON: Inside(step, recorded), **others}, options.runs, seconds, timer=timer)
        for name, each in times.items():
            row = microseconds(each)
            ratio = statistics.median(map(operator.truediv, each, times[OFF]))
            more = {"overhead_percent": None if name == OFF else 100 * (ratio - 1)}
            report.add(
                {"batch": number, "who": f"  {name}", "wrong": None, "time_ms": row["time_us"] / 1e3, **row, **more}
            )
        of_a_step(step, report, statistics.median(times[OFF]))


if __name__ == "__main__":
    batches = flag("--batches", [1], metavar="N", help="sequences of a rank (1)")
    main("observing", __doc__, COLUMNS, bench, [batches], runs=15, in_job=True, with_torch=True)
