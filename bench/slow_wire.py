"""On a slow wire: how long until the loss that fp32 reaches, by each way to send less. Run it as root, alone.

    python bench/slow_wire.py                                                # a quarter of an hour
    python bench/slow_wire.py --seeds 0 1 2 --steps 1000 --json slow_wire.json --plot slow_wire.png
    python bench/slow_wire.py --rates 100 --who fp32 int4 "DDP fp32"

The transformer of examples/train_gpt.py with 1.06 M parameters learns Python's own modules; 4 sequences of 64 bytes a
rank and step, AdamW, one thread. The hosts are network namespaces with shaped links (`bench/network.py`), one rank on
each. First all ways train, on links that are not shaped, for their losses and bytes; a rank's data depend on the seed,
the step and the rank alone. Then all take steps at each rate, for their time.

    fp32 … int4         ringreduce.torch.DistributedOptimizer(compression=...)
    PowerSGD-4, -8      the same, compression=PowerSGD(rank=...), after 20 steps of fp32
    LocalSGD            ringreduce.torch.LocalSGD(sync_every=8), after 20 such steps
    DiLoCo int4         ringreduce.torch.DiLoCo(sync_every=20, fragments=4, delay=5, compression=int4), likewise, for
                        three times as many steps
    DDP …               DistributedDataParallel on gloo, its fp16 and PowerSGD hooks, its post-local SGD

Columns: bytes that a step sends from the host that sends most, counted at its interface; over fp32's; the loss on held
out text after fp32's last step, of the mean of all ranks' parameters, over fp32's; steps until the loss that fp32 has
after two thirds of the steps; a step's time, of the slowest rank; the same with a core for each rank (less what
computing takes longer beside the others); how many times sooner than fp32 that loss is there, with cores of their own;
the most that any way can be sooner, if it sent nothing and learnt as well: with 4 hosts 1 + F / (T W), with F FLOP/s of
a rank, T its tokens a step, W bytes/s of the wire; `#wrong`: elements of parameters that are not the same on all ranks,
of ways that reduce each gradient. A figure is the mean over seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plots
from common import Column, Report, flag, machine, main, package_version
from network import Network, why_not

FP32, ALONE = "fp32", "compute alone"
WHO = (
    *(ALONE, FP32, "fp16", "int8", "int4", "PowerSGD-4", "PowerSGD-8", "LocalSGD", "DiLoCo int4"),
    *("DDP fp32", "DDP fp16", "DDP PowerSGD-4", "DDP PowerSGD-8", "DDP post-local"),
)
TIMEOUT_S = 7200
WORKER = str(Path(__file__).with_name("slow_wire_worker.py"))
COLUMNS = (
    Column("mbit", "rate", "Mbit/s", 8, "d"),
    Column("who", "  who", width=18, left=True),
    Column("wire_bytes", "sent", "B a step", 10, ".0f"),
    Column("of_fp32", "of fp32", "", 9, ".4f"),
    Column("loss_percent", "loss", "% over fp32", 12, "+.2f"),
    Column("steps", "steps", "to its loss", 12, ".0f"),
    Column("step_ms", "step", "ms", 9, ".1f"),
    Column("own_ms", "own cores", "ms", 10, ".1f"),
    Column("sooner", "sooner", "times", 8, ".2f"),
    Column("ceiling", "ceiling", "times", 8, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def run(network: Network, **job: Any) -> dict[str, Any]:
    """What the ranks found."""
    return network.run([sys.executable, WORKER, json.dumps(job)], timeout_s=TIMEOUT_S)


def steps_to(losses: Sequence[tuple[int, float]], target: float) -> float | None:
    """The step at which a line through the losses falls to `target`; None: it does not."""
    for (step, loss), (next_step, next_loss) in itertools.pairwise(losses):
        if next_loss <= target:
            return step + (next_step - step) * max(0.0, (loss - target) / (loss - next_loss))
    return None


def learnt(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By way, the means over seeds, each beside fp32 of the same seed."""
    whole = {row["seed"]: row["losses"] for row in found if row["who"] == FP32}
    last = next(iter(whole.values()))[-1][0]
    by_way: dict[str, dict[str, Any]] = {}
    for who in dict.fromkeys(row["who"] for row in found):
        mine = [row for row in found if row["who"] == who]
        over = [dict(row["losses"])[last] / whole[row["seed"]][-1][1] - 1 for row in mine]
        targets = [whole[row["seed"]][len(whole[row["seed"]]) * 2 // 3][1] for row in mine]
        steps = [steps_to(row["losses"], target) for row, target in zip(mine, targets, strict=True)]
        by_way[who] = {
            "wire_bytes": statistics.mean(row["wire_bytes"] for row in mine),
            "loss_percent": 100 * statistics.mean(over),
            "steps": None if None in steps else statistics.mean(each for each in steps if each is not None),
            "losses": [row["losses"] for row in mine],
            "wrong": sum(row["wrong"] for row in mine),
        }
    return by_way


def rows(mbit: int, times: dict[str, Any], ways: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One rate's."""
    seconds = {row["who"]: row["step_s"] for row in times["rows"]}
    shared_s = seconds[ALONE] - times["alone_s"]  # what computing takes longer beside the others
    own = {who: max(each - shared_s, times["alone_s"]) for who, each in seconds.items()}
    found = []
    for who, way in ways.items():  # computing alone has learnt nothing
        row = {"mbit": mbit, "who": f"  {who}", "step_ms": seconds[who] * 1e3, "own_ms": own[who] * 1e3, **way}
        row["of_fp32"] = way["wire_bytes"] / ways[FP32]["wire_bytes"]
        row["ceiling"] = own[FP32] / times["alone_s"]
        if way["steps"]:
            row["sooner"] = own[FP32] * ways[FP32]["steps"] / (own[who] * way["steps"])
        found.append(row)
    return found


def plot(report: Report, path: str) -> None:
    """Loss over seconds, a panel for each rate."""
    rates = list(dict.fromkeys(row["mbit"] for row in report.rows))
    figure, axes = plots.canvas(1, len(rates), (5 * len(rates), 5), sharey=True)
    for panel, mbit in zip(axes[0], rates, strict=True):
        mine = [row for row in report.rows if row["mbit"] == mbit]
        for number, row in enumerate(mine):
            steps, losses = zip(*row["losses"][0], strict=True)
            style = "--" if "DDP" in row["who"] else "-"
            times = [each * row["own_ms"] / 1e3 for each in steps]
            panel.plot(times, losses, style, color=f"C{number % 10}", label=row["who"].strip())
        panel.set(xscale="log", xlabel="seconds, with cores of their own")
        panel.set_title(f"{mbit} Mbit/s", fontsize=9)
        panel.grid(which="major", alpha=0.3)
    axes[0][0].set_ylabel("loss on held out text, nats a byte")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    plots.finish(figure, "Training on a slow wire: loss over time (left is better)", report.header, path)


def check(options: argparse.Namespace) -> str:
    """What is wrong with the options."""
    options.who = list(dict.fromkeys((ALONE, FP32, *options.who)))
    if options.hosts < 2 or options.steps < 60:
        return "expected --hosts of 2 or more, --steps of 60 or more"
    return ""


def bench(options: argparse.Namespace, report: Report) -> None:
    """All losses first, then rate by rate."""
    with Network(options.hosts) as network:
        learning = [each for each in options.who if each != ALONE]
        ways = learnt(run(network, who=learning, seeds=options.seeds, steps=options.steps)["rows"])
        for mbit in options.rates:
            network.shape(mbit)
            for row in rows(mbit, run(network, who=options.who, seconds=options.seconds), ways):
                report.add(row)


if __name__ == "__main__":
    flags = [
        flag("--hosts", 4, 2, metavar="H", help="(4)"),
        flag("--rates", [10, 100, 1000], [100], metavar="MBIT", help="(10 100 1000)"),
        flag("--steps", 400, 60, metavar="N", help="each way trains so long (400)"),
        flag("--seeds", [0], metavar="S", help="(0)"),
        flag("--seconds", 10.0, 0.2, metavar="S", help="of steps that are timed (10)"),
        flag("--who", list(WHO), choices=WHO, metavar="WAY", help=f"rows ({', '.join(WHO)})"),
    ]
    note = "{hosts} hosts, a rank on each; {steps} steps, seeds {seeds}"
    main(
        "slow_wire",
        __doc__,
        COLUMNS,
        bench,
        flags,
        runs=1,
        note=note,
        header=lambda _: {**machine(), "torch": package_version("torch")},
        check=check,
        why_not=why_not,
        plot=plot,
    )
