"""A rank dies: how long until the others have completed their next step? Run it alone.

    python bench/elastic.py                # 5 deaths each: about two minutes; --runs 20 for the tails
    python bench/elastic.py --who torch    # only the rows with this in their name; --alone: without the peers
    python bench/elastic.py --steady       # what --elastic costs while nobody dies

Rows: who dies, and how the job goes on: `elastic` in the same processes, `restarts` by `ringrun --restarts 1` from a
file, `torchrun` likewise by torchrun --max-restarts with gloo. The deaths come at steps from the first one after
init() on. A step is an all-reduce of 4 MB and a commit, or with `torch` a forward and backward pass of 25 MB of
parameters, DistributedOptimizer's step and a commit. Columns, medians in ms, on the slowest rank: `heard`, from the
death until the ranks have the list of those that are left (the agent sees the death, ringrun decides); until their
handles have `failed` and the state is restored; until the old engine has `stopped`; until all have `met`; the new
`engine`; the next `step`, and the `usual` one. `total`, its 95th percentile, and `above`, what it is above a usual
step. `#wrong`: elements.

--steady: a tenth of the steps take less than the `fast step`; `processor`: time that all threads of a rank take for a
step, on the rank that takes most; `switches`: how often a step gives up the core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common import Column, Report, beside, machine, parse, parser, run_command, run_job
from contenders import has

PARTS = {"heard": "heard", "failed": "failed", "stopped": "stopped", "met": "met", "new engine": "engine"}
COLUMNS = (
    Column("who", "who dies", width=24, left=True),
    Column("how", "how", "", 10),
    *(Column(each, each, "ms", 9, ".1f") for each in (*PARTS.values(), "step", "usual")),
    Column("total", "total", "ms", 9, ".1f"),
    Column("p95", "95 %", "ms", 9, ".1f"),
    Column("above", "above", "ms", 9, ".1f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
STEADY = (
    Column("how", "how", width=12, left=True),
    Column("time_us", "step", "µs", 10, ".0f"),
    *(
        Column(f"{name}{part}", part or title, unit, 10, form)
        for name, title, unit in (("fast_us", "fast step", "µs"), ("cpu_us", "processor", "µs"))
        for part, unit, form in (("", unit, ".0f"), (" ratio", "", ".3f"), (" from", "", ".3f"), (" to", "", ".3f"))
    ),
    Column("switches", "switches", "", 10, ".1f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
COUNT = 1 << 20  # float32 elements: 4 MiB
LAYERS, WIDTH, BATCH = 4, 1264, 8  # of the model: 25.6 MB


class Who(NamedTuple):
    """Who dies, in which job."""

    size: int
    rank: int
    how: str
    restarts: bool = True  # the same with --restarts, too
    is_torch: bool = False


WHO = {
    "NumPy, 4 ranks, rank 2": Who(4, 2, "kill"),
    "NumPy, 3 ranks, rank 0": Who(3, 0, "exit"),
    "torch, 4 ranks, rank 2": Who(4, 2, "kill", restarts=False, is_torch=True),
    "torch, 3 ranks, rank 0": Who(3, 0, "exit", restarts=False, is_torch=True),
}
NOBODY = Who(2, -1, "")
STEPS_AFTER, STEADY_STEPS, LAST_DEATH = 3, 1000, 40

Step = Callable[[], object]
Wrong = Callable[[int], int]
"""How many elements are wrong after so many steps."""


def with_numpy() -> tuple[Any, Step, Wrong]:
    """The state, a step but its commit, and the check."""
    import numpy as np

    import ringreduce as rr

    state, gradient = rr.elastic.ObjectState(parameters=np.zeros(COUNT, np.float32), step=0), np.ones(COUNT, np.float32)

    def step() -> None:
        state.parameters += rr.allreduce(gradient, op=rr.Average, name="gradient")

    return state, step, lambda steps: int((state.parameters != steps).sum())


def with_torch() -> tuple[Any, Step, Wrong]:
    """The same; all ranks have the same data, so that one process alone computes what must come out."""
    import torch

    import ringreduce.torch as hvd

    def made() -> tuple[Any, Any]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    def wrong(steps: int) -> int:
        alone = made()
        for _ in range(steps):
            step(*alone)
        pairs = zip(model.parameters(), alone[0].parameters(), strict=True)
        return sum(int((~torch.isclose(one, other, rtol=1e-4, atol=1e-6)).sum()) for one, other in pairs)

    (model, plain), data = made(), torch.linspace(-1, 1, BATCH * WIDTH).reshape(BATCH, WIDTH)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters())
    return hvd.elastic.TorchState(model, optimizer, step=0), lambda: step(model, optimizer), wrong


def work(folder: Path, kind: str, dies: int, how: str, at: int) -> None:
    """One rank: rank `dies` of the start ends before step `at`; -1: none, and nothing is committed."""
    import numpy as np

    import ringreduce as rr
    from ringreduce import runtime

    rr.init()
    rank, kept, death = int(os.environ["RANK"]), folder / "state.npy", folder / "death"
    state, step, wrong = with_torch() if kind == "torch" else with_numpy()
    if kept.exists():
        state.parameters, state.step = np.load(kept), at
    took_s: list[float] = []

    @rr.elastic.run
    def train(state: Any) -> None:
        while state.step < at + STEPS_AFTER:
            if state.step == at and dies >= 0 and not death.exists():
                if rank == 0 and not os.environ.get("RINGREDUCE_ELASTIC"):
                    np.save(kept, state.parameters)
                rr.barrier()
                if rank == dies:
                    death.write_text(repr(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(7)
            began_s = time.monotonic()
            step()
            state.step += 1
            if dies >= 0:
                state.commit()
            took_s.append(time.monotonic() - began_s)
            if state.step == at + 1 and death.exists():
                write(time.monotonic())

    def write(now_s: float) -> None:
        last_s, found = float(death.read_text()), {"total": 1e3 * (now_s - float(death.read_text()))}
        for name, at_s in getattr(runtime.current("bench"), "times_s", {}).items():
            found[PARTS[name]], last_s = 1e3 * (at_s - last_s), at_s
        found["step"] = 1e3 * (now_s - last_s)
        (folder / f"{rank}.json").write_text(json.dumps(found))

    before = resource.getrusage(resource.RUSAGE_SELF)
    train(state)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = {
        "wrong": wrong(state.step),
        "median_s": statistics.median(took_s),
        "fast_s": sorted(took_s)[len(took_s) // 10],
        "cpu_s": cpu_s / len(took_s),
        "switches": (after.ru_nvcsw - before.ru_nvcsw) / len(took_s),
    }
    (folder / f"{rank}.end").write_text(json.dumps(result))


def work_by_torchrun(folder: Path, dies: int, at: int) -> None:
    """The same by torch.distributed alone: all ranks are started again, and read the state from a file."""
    import numpy as np
    import torch
    from torch import distributed

    rank, kept, death = int(os.environ["RANK"]), folder / "state.npy", folder / "death"
    distributed.init_process_group("gloo")
    is_first = not death.exists()
    start = 0 if is_first else at
    parameters = torch.zeros(COUNT) if is_first else torch.from_numpy(np.load(kept))
    took_s: list[float] = []
    for step in range(start, at + STEPS_AFTER):
        if step == at and is_first:
            if rank == 0:
                np.save(kept, parameters.numpy())
            distributed.barrier()
            if rank == dies:
                death.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        gradient = torch.ones(COUNT)
        distributed.all_reduce(gradient)
        parameters += gradient / distributed.get_world_size()
        took_s.append(time.monotonic() - began_s)
        if step == at:
            found = {"total": 1e3 * (time.monotonic() - float(death.read_text())), "step": 1e3 * took_s[-1]}
            (folder / f"{rank}.json").write_text(json.dumps(found))
    median_s, wrong = statistics.median(took_s), int((parameters != at + STEPS_AFTER).sum())
    result = {"wrong": wrong, "median_s": median_s, "fast_s": min(took_s), "cpu_s": 0, "switches": 0}
    (folder / f"{rank}.end").write_text(json.dumps(result))
    distributed.destroy_process_group()


def torchrun(size: int, program: list[str]) -> str:
    """What a job of torchrun prints whose ranks are started again."""
    options = ["--standalone", "--nproc-per-node", str(size), "--max-restarts", "3"]
    # ranks that share the agent's store find the addresses of before the restart in it (torch 2.13), and fail
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return run_command([sys.executable, beside("torchrun"), *options, *program], 120, variables)


def run(who: Who, at: int, flags: list[str] | None) -> dict[str, Any]:
    """One job of ringrun, by torchrun without flags; what the slowest rank has found, and all wrong elements."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind = "torchrun" if flags is None else "torch" if who.is_torch else "numpy"
        program = [__file__, "--worker", name, kind, str(who.rank), who.how, str(at)]
        if flags is None:
            printed = torchrun(who.size, program)
        else:
            printed = run_job([*flags, "-np", str(who.size)], program, 120)
        ends = [json.loads(each.read_text()) for each in folder.glob("*.end")]
        if len(ends) < who.size - (who.rank >= 0):
            raise SystemExit(f"the job failed:\n{printed}")
        found = max((json.loads(each.read_text()) for each in folder.glob("*.json")), key=total, default={})
        slowest_s = max(each["median_s"] for each in ends)
        return {
            **found,
            "wrong": sum(each["wrong"] for each in ends),
            "usual": 1e3 * slowest_s,
            "time_us": 1e6 * slowest_s,
            "fast_us": 1e6 * max(each["fast_s"] for each in ends),
            "cpu_us": 1e6 * max(each["cpu_s"] for each in ends),
            "switches": max(each["switches"] for each in ends),
        }


def total(found: dict[str, float]) -> float:
    """For the slowest rank."""
    return found["total"]


def deaths(options: argparse.Namespace) -> Report:
    """Who dies, and how the job goes on."""
    note = f"medians of {options.runs} deaths, on the slowest rank"
    report = Report("elastic", machine(), COLUMNS, True, note)
    times = [run * LAST_DEATH // max(1, options.runs - 1) for run in range(options.runs)]
    for name, who in WHO.items():
        if options.who not in name:
            continue
        ways: list[tuple[str, list[str] | None, list[int]]] = [("elastic", ["--elastic"], times)]
        if who.restarts and not options.alone:
            ways += [("restarts", ["--restarts", "1"], times)]
            ways += [("torchrun", None, times)] if has("torch") and who.how == "kill" else []
        for how, flags, moments in ways:
            found = [run(who, at, flags) for at in moments]
            totals = sorted(each["total"] for each in found)
            keys = found[0].keys() - {"wrong"}
            medians = {key: statistics.median(each[key] for each in found) for key in keys}
            medians["above"] = statistics.median(each["total"] - each["usual"] for each in found)
            p95 = totals[min(len(totals) - 1, math.ceil(0.95 * len(totals)) - 1)]
            wrong = sum(each["wrong"] for each in found)
            times_us = {"runs_us": [round(1e3 * each["total"], 2) for each in found]}
            report.add({"who": name, "how": how, **medians, "p95": p95, "wrong": wrong, "all": found, **times_us})
    return report


def steady(options: argparse.Namespace) -> Report:
    """The same steps with and without --elastic, in turns; the ratio of pairs, and its interval of 95 %."""
    note = (
        f"{STEADY_STEPS} all-reduces of 4 MB, medians of {options.runs} pairs of jobs, 2 ranks; fast: a tenth is faster"
    )
    report = Report("elastic, nobody dies", machine(), STEADY, True, note)
    times: dict[str, list[dict[str, Any]]] = {"plain": [], "elastic": []}
    for k in range(options.runs):
        for how in sorted(times, reverse=k % 2 == 0):
            times[how].append(run(NOBODY, STEADY_STEPS, ["--elastic"] if how == "elastic" else []))
    low, high = interval(options.runs)
    for how, found in times.items():
        keys = ("time_us", "fast_us", "cpu_us", "switches")
        row = {key: statistics.median(each[key] for each in found) for key in keys}
        for key in ("fast_us", "cpu_us") if how == "elastic" else ():
            ratios = sorted(one[key] / other[key] for one, other in zip(found, times["plain"], strict=True))
            row |= {f"{key} ratio": statistics.median(ratios), f"{key} from": ratios[low], f"{key} to": ratios[high]}
        report.add({"how": how, **row, "wrong": sum(each["wrong"] for each in found), "all": found})
    return report


def interval(count: int) -> tuple[int, int]:
    """Which of so many sorted values enclose the median with 95 % certainty, or as well as they can."""
    chances = [math.comb(count, k) / 2**count for k in range(count)]
    low = 0
    while sum(chances[: low + 1]) <= 0.025:
        low += 1
    low = max(0, low - 1)
    return low, count - 1 - low


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__, runs=5)
    made.add_argument("--who", default="", help="a part of the names of the rows to measure (all)")
    made.add_argument("--alone", action="store_true", help="without --restarts and torchrun")
    made.add_argument("--steady", action="store_true", help="nobody dies")
    made.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    return parse(made)


def main() -> None:
    """One job after the other."""
    options = arguments()
    if options.worker:
        folder, kind, dies, how, at = options.worker
        if kind == "torchrun":
            work_by_torchrun(Path(folder), int(dies), int(at))
        else:
            work(Path(folder), kind, int(dies), how, int(at))
        return
    (steady if options.steady else deaths)(options).finish(options)


if __name__ == "__main__":
    main()
