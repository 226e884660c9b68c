"""Does tuning win? A model's gradients with the default knobs, while tuning, and with the knobs that were found.

    ringrun -np 2 python bench/autotune.py
    ringrun -np 4 python bench/autotune.py --models resnet50 gpt2 --json autotune.json

All gradients of a model (`bench/models.py`), float32, averaged through the public API as `bench/gradients.py` does. A
first job trains with RINGREDUCE_AUTOTUNE=1 until all ranks have what was found. Then jobs of two kinds take turns, all
in the same processes: one loads the file, the other does not. Columns:

    time       of all tensors together: the median, over steps while tuning, over jobs otherwise; of the slowest rank
    mean       while tuning: what the search costs by the way
    steps      that were measured
    of default how often the time with the default knobs
    #wrong     elements that differ from the average, computed apart
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import plots
from common import Column, Report, about, is_printing, neutral, parse, parser, seconds_per_call, slowest, total
from models import MODELS
from reducers import Gradients, Reducer, ours

import ringreduce as rr

SECONDS_PER_RUN = 0.3
MOST_STEPS = 4000
WARM_UP_STEPS = 5
COLUMNS = (
    Column("model", "model", width=10, left=True),
    Column("who", "who", width=16, left=True),
    Column("time_ms", "time", "ms", 9, ".2f"),
    Column("mean_ms", "mean", "ms", 9, ".2f"),
    Column("steps", "steps", "", 7, "d"),
    Column("of_default", "of default", "times", 11, ".3f"),
    Column("wrong", "#wrong", "", 8, "d"),
    Column("knobs", "  knobs", width=20, left=True),
)
DEFAULT, TUNING, TUNED = "default knobs", "while tuning", "tuned knobs"


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__, runs=9)
    made.add_argument("--models", nargs="+", choices=MODELS, default=None, help="(resnet50)")
    options = parse(made)
    options.models = options.models or (["tiny"] if options.quick else ["resnet50"])
    return options


def job(variables: dict[str, str], work: Callable[[], Any]) -> Any:
    """Init with these settings, work, shut down."""
    os.environ.update(variables)
    rr.init()
    try:
        return work()
    finally:
        rr.shutdown()
        for name in variables:
            del os.environ[name]


def until_tuned(reducer: Reducer) -> list[float]:
    """The seconds of every step, until all ranks use what was found."""
    times: list[float] = []
    while len(times) < MOST_STEPS:
        times.append(seconds_per_call(reducer.run, 1))
        if slowest(float(rr.info().knobs.origin != "tuned")) == 0:
            return times
    sys.exit("bench/autotune.py: the search did not end")


def measured(reducer: Reducer, steps: int) -> tuple[float, str]:
    """The seconds of a step in this job, and the knobs with which they ran."""
    for _ in range(WARM_UP_STEPS):
        reducer.run()
    return seconds_per_call(reducer.run, steps), str(rr.info().knobs)


def compared(reducer: Reducer, gradients: Gradients, runs: int, path: str) -> dict[str, dict[str, Any]]:
    """All rows of a model."""
    tuning = job({"RINGREDUCE_AUTOTUNE": "1", "RINGREDUCE_AUTOTUNE_FILE": path}, lambda: until_tuned(reducer))
    steps = max(1, int(SECONDS_PER_RUN / statistics.median(tuning)))
    kinds = {DEFAULT: {}, TUNED: {"RINGREDUCE_AUTOTUNE_FILE": path}}
    times: dict[str, list[float]] = {DEFAULT: [], TUNED: []}
    rows: dict[str, dict[str, Any]] = {DEFAULT: {}, TUNING: _row(tuning, len(tuning), "(various)"), TUNED: {}}
    for run in range(runs):
        for who in (DEFAULT, TUNED) if run % 2 == 0 else (TUNED, DEFAULT):
            seconds, knobs = job(kinds[who], lambda: measured(reducer, steps))
            times[who].append(seconds)
            rows[who] = _row(times[who], runs * steps, knobs)
    for who, variables in kinds.items():
        rows[who]["wrong"] = job(variables, lambda: total(gradients.wrong(reducer)))
    return rows


def _row(times: list[float], steps: int, knobs: str) -> dict[str, Any]:
    return {
        "time_ms": statistics.median(times) * 1e3,
        "mean_ms": statistics.mean(times) * 1e3,
        "steps": steps,
        "wrong": None,
        "knobs": f"  {knobs}",
        "runs_ms": [round(each * 1e3, 3) for each in times],
    }


def tried(found: dict[str, Any]) -> str:
    """What was tried and how fast it was, on rank 0."""
    return ", ".join(f"{'/'.join(map(str, each['knobs'].values()))}: {each['gbs']}" for each in found.get("tried", []))


def plot(report: Report, path: str) -> None:
    """Bars from zero, a panel for each model: how fast each candidate was; the defaults as a line through all."""
    searches = [(row["model"], row["found"]["tried"]) for row in report.rows if "found" in row]
    figure, axes = plots.canvas(1, len(searches), (6.2 * len(searches), 4))
    for panel, (model, candidates) in zip(axes[0], searches, strict=True):
        names = ["\n".join(f"{key} {value}" for key, value in each["knobs"].items()) for each in candidates]
        panel.barh(names, [each["gbs"] or 0 for each in candidates])
        panel.axvline(candidates[0]["gbs"], color="0.5", lw=0.8, ls="--")
        panel.tick_params(axis="y", labelsize=4)
        panel.invert_yaxis()
        panel.set(xlim=(0, None), xlabel="GB/s of busy time, higher is better")
        panel.set_title(model, fontsize=10)
    header = report.header
    plots.finish(figure, f"What autotune tried, {header['ranks']} ranks; the first are the defaults", header, path)


def main() -> None:
    """Measure model by model."""
    options = arguments()
    rr.init()  # starts MPI, which `about` asks
    hosts = len(set(rr.info().hosts))
    rr.shutdown()
    note = f"median of {options.runs} jobs of each kind, in turns, of the slowest rank"
    report = Report("autotune", about(hosts=hosts), COLUMNS, is_printing(), note)
    for model in options.models:
        gradients = Gradients(MODELS[model]())
        reducer = ours(gradients, rr, gradients.arrays)
        with tempfile.TemporaryDirectory() as folder:
            path = neutral().bcast(os.path.join(folder, "tuned.json"))  # rank 0's: no other rank opens it
            rows = compared(reducer, gradients, options.runs, path)
            if is_printing():
                with open(path, encoding="utf-8") as file:
                    rows[TUNING]["found"] = json.load(file)
        for who, row in rows.items():
            report.add({"model": model, "who": who, **row, "of_default": row["time_ms"] / rows[DEFAULT]["time_ms"]})
        report.say("# GB/s while tuning: " + tried(rows[TUNING].get("found", {})))
    report.write(options.json)
    if options.plot and is_printing():
        plot(report, options.plot)
    report.finish()


if __name__ == "__main__":
    main()
