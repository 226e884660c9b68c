"""A rank dies: how long until the others have completed their next step? Run it alone.

    python bench/elastic.py                # 5 deaths each: about two minutes; --runs 20 for the tails
    python bench/elastic.py --steady       # what --elastic costs while nobody dies

Rows: who dies, and how the job goes on: `elastic` in the same processes, `restarts` by `ringrun --restarts 1` from a
file, as everybody else does it. Columns, medians in ms, on the slowest rank: `heard`, from the death until the ranks
have the list of those that are left (the agent sees the death, ringrun decides); until their handles have `failed` and
the state is restored; until the old engine has `stopped`; until all have `met`; the new `engine`; the next `step`, an
all-reduce of 4 MB and a commit, and the `usual` one. `total` and its 95th percentile. `#wrong`: elements.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Column, Report, machine, parse, parser

PARTS = {"heard": "heard", "failed": "failed", "stopped": "stopped", "met": "met", "new engine": "engine"}
COLUMNS = (
    Column("who", "who dies", width=22, left=True),
    Column("how", "how", "", 10),
    *(Column(each, each, "ms", 9, ".1f") for each in (*PARTS.values(), "step")),
    Column("usual", "usual", "ms", 9, ".1f"),
    Column("total", "total", "ms", 9, ".1f"),
    Column("p95", "95 %", "ms", 9, ".1f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
STEADY = (
    Column("how", "how", width=12, left=True),
    Column("time_us", "step", "µs", 10, ".0f"),
    Column("best_us", "best run", "µs", 10, ".0f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
COUNT = 1 << 20  # float32 elements: 4 MiB
WHO = {"4 ranks, rank 2": (4, 2, "kill"), "3 ranks, rank 0": (3, 0, "exit")}
STEPS_AFTER, STEADY_STEPS = 3, 200


def work(folder: Path, dies: int, how: str, at: int) -> None:
    """One rank: rank `dies` of the start ends before step `at`; -1: none."""
    import numpy as np

    import ringreduce as rr
    from ringreduce import runtime

    rr.init()
    rank, kept, death = int(os.environ["RANK"]), folder / "state.npy", folder / "death"
    state = rr.elastic.ObjectState(parameters=np.zeros(COUNT, np.float32), step=0)
    if kept.exists():
        state.parameters, state.step = np.load(kept), at
    took_s: list[float] = []

    @rr.elastic.run
    def train(state: Any) -> None:
        while state.step < at + STEPS_AFTER:
            if state.step == at and not death.exists():
                if rank == 0 and not os.environ.get("RINGREDUCE_ELASTIC"):
                    np.save(kept, state.parameters)
                rr.barrier()
                if rank == dies:
                    death.write_text(repr(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(7)
            began_s = time.monotonic()
            state.parameters += rr.allreduce(np.ones(COUNT, np.float32), op=rr.Average, name="gradient")
            state.step += 1
            state.commit()
            took_s.append(time.monotonic() - began_s)
            if state.step == at + 1 and death.exists():
                write(time.monotonic())

    def write(now_s: float) -> None:
        last_s, found = float(death.read_text()), {"total": 1e3 * (now_s - float(death.read_text()))}
        elastic = runtime.current("bench").elastic
        for name, at_s in (elastic.times_s if elastic else {}).items():
            found[PARTS[name]], last_s = 1e3 * (at_s - last_s), at_s
        found["step"] = 1e3 * (now_s - last_s)
        (folder / f"{rank}.json").write_text(json.dumps(found))

    train(state)
    wrong = int((state.parameters != at + STEPS_AFTER).sum())
    result = {"wrong": wrong, "median_s": statistics.median(took_s)}
    (folder / f"{rank}.end").write_text(json.dumps(result))


def run(size: int, dies: int, how: str, at: int, flags: list[str]) -> dict[str, Any]:
    """One job; what the slowest rank has found, and the count of wrong elements of all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [str(Path(sys.executable).with_name("ringrun")), *flags, "-np", str(size), sys.executable, __file__]
        done = subprocess.run(
            [*command, "--worker", name, str(dies), how, str(at)], capture_output=True, text=True, timeout=120
        )
        ends = [json.loads(each.read_text()) for each in folder.glob("*.end")]
        if done.returncode or len(ends) < size - 1:
            raise SystemExit(f"the job failed:\n{done.stdout}{done.stderr}")
        found = max((json.loads(each.read_text()) for each in folder.glob("*.json")), key=total, default={})
        slowest_s = max(each["median_s"] for each in ends)
        return {
            **found,
            "wrong": sum(each["wrong"] for each in ends),
            "usual": 1e3 * slowest_s,
            "time_us": 1e6 * slowest_s,
        }


def total(found: dict[str, float]) -> float:
    """For the slowest rank."""
    return found["total"]


def deaths(options: argparse.Namespace) -> Report:
    """Who dies, and how the job goes on."""
    note = f"medians of {options.runs} deaths, on the slowest rank"
    report = Report("elastic", machine(), COLUMNS, True, note)
    for who, (size, dies, how) in WHO.items():
        for name, flags, runs in (("elastic", ["--elastic"], options.runs), ("restarts", ["--restarts", "1"], 1)):
            found = [run(size, dies, how, options.at, flags) for _ in range(runs)]
            totals = sorted(each["total"] for each in found)
            keys = found[0].keys() - {"wrong"}
            medians = {key: statistics.median(each[key] for each in found) for key in keys}
            p95 = totals[min(len(totals) - 1, math.ceil(0.95 * len(totals)))]
            wrong = sum(each["wrong"] for each in found)
            report.add({"who": who, "how": name, **medians, "p95": p95, "wrong": wrong, "totals": totals})
    return report


def steady(options: argparse.Namespace) -> Report:
    """The same steps with and without --elastic, in turns."""
    note = f"median step of {STEADY_STEPS}, medians of {options.runs} jobs each, 2 ranks; the commit is part of it"
    report = Report("elastic, nobody dies", machine(), STEADY, True, note)
    times: dict[str, list[dict[str, Any]]] = {"plain": [], "elastic": []}
    for _ in range(options.runs):
        for how, found in times.items():
            found.append(run(2, -1, "kill", STEADY_STEPS, ["--elastic"] if how == "elastic" else []))
    for how, found in times.items():
        each = [one["time_us"] for one in found]
        wrong = sum(one["wrong"] for one in found)
        report.add({"how": how, "time_us": statistics.median(each), "best_us": min(each), "wrong": wrong, "all": each})
    return report


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__, runs=5)
    made.add_argument("--at", type=int, default=40, help="the step before which a rank dies (40)")
    made.add_argument("--steady", action="store_true", help="nobody dies")
    made.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    return parse(made)


def main() -> None:
    """One job after the other."""
    options = arguments()
    if options.worker:
        folder, dies, how, at = options.worker
        work(Path(folder), int(dies), how, int(at))
        return
    (steady if options.steady else deaths)(options).finish(options)


if __name__ == "__main__":
    main()
