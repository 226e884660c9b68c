"""The gradients of whole models: ours beside DDP on gloo, MPI_Allreduce and Horovod, and beside one copy in memory.

    ringrun -np 2 python bench/gradients.py
    ringrun -np 4 python bench/gradients.py --models resnet50 --json gradients.json --plot gradients.png
    python bench/gradients.py --models resnet50 --hosts 4    # a rank on each, see bench/network.py

Every rank has all gradients of a model (`bench/models.py`), float32, and all get the average. The rows:

    ringreduce, NumPy      allreduce_async_ with a name for every tensor, in backward's order, then synchronize all
    ringreduce, no compiler  the same without the compiled module, by NumPy's passes
    ringreduce, torch      the same through ringreduce.torch, on torch tensors
    DDP gloo               a backward that computes nothing but hands over the gradients, gradient_as_bucket_view=True,
                           less the time of the same backward without DDP
    DDP ring               the same over the torch.distributed backend "ring"
    MPI_Allreduce, packed  a sum of one buffer; packing it, dividing it and unpacking it are not counted
    Horovod's way          the same, and they are counted: how Horovod reduces on CPUs, without its thread
    fused window, simplest a sum in place by bench/fused_window.py: the algorithm alone, two MPI barriers a slot
    Horovod                as ours, measured after all others, since its thread polls
    floor: raw TCP         with --hosts: a stream of as many bytes as each host must send, from one host to another
    floor: one copy        every rank copies all gradients once, all at the same time

Columns: time of all tensors together (median of several runs, the rows in turns, of the slowest rank); how often the
floor's time that is; how often the time of `ringreduce, NumPy`; elements that differ from the average, or the sum,
computed apart. Memory: about four times the gradients on each rank (GPT-2: 2 GB). With --hosts, as root, a rank runs on
each of so many network namespaces (bench/network.py), without the simplest form.
"""

from __future__ import annotations

import argparse
import gc
import operator
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import plots
from common import Column, Report, about, in_turns, is_printing, microseconds, parser, seconds_per_run, total
from contenders import has, missing, stop_gloo
from models import MODELS
from network import Network, why_not
from reducers import ALONE, DDP, DDP_RING, FLOOR, NUMPY, WIRE, Gradients, Reducer, arguments, horovod, reducers
from state import state

import ringreduce as rr

SECONDS_PER_RUN = 0.15
COLUMNS = (
    Column("model", "model", width=10, left=True),
    Column("who", "who", width=23, left=True),
    Column("tensors", "tensors", "", 8, "d"),
    Column("mb", "size", "MB", 8, ".1f"),
    Column("time_ms", "time", "ms", 9, ".2f"),
    Column("algbw_gbs", "algbw", "GB/s", 8, ".2f"),
    Column("of_floor", "of floor", "times", 10, ".2f"),
    Column("of_ours", "of ours", "times", 10, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def measured(
    compared: Mapping[str, Reducer], gradients: Gradients, runs: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """The times of all, in turns, with what DDP's backward takes by itself subtracted from DDP's; then the checks."""
    times = in_turns({name: reducer.run for name, reducer in compared.items()}, runs, seconds)
    alone = times.pop(ALONE, None)
    found = {name: microseconds(each) for name, each in times.items()}
    if alone:
        for name in (DDP, DDP_RING):
            less = microseconds(list(map(operator.sub, times[name], alone)))
            found[name] = {**less, "backward_alone_us": microseconds(alone)["time_us"]}
    for name, row in found.items():
        row["wrong"] = None if name in (FLOOR, WIRE) else total(gradients.wrong(compared[name]))
    return found


def rows(
    model: str, gradients: Gradients, found: dict[str, dict[str, Any]], floor_us: float, ours_us: float
) -> list[dict[str, Any]]:
    """The rows of one model."""
    about_model = {"model": model, "tensors": len(gradients.arrays), "mb": gradients.nbytes / 1e6}
    return [
        {
            **about_model,
            "who": name,
            "time_ms": row["time_us"] / 1e3,
            "algbw_gbs": gradients.nbytes / row["time_us"] / 1e3,
            "of_floor": row["time_us"] / floor_us,
            "of_ours": row["time_us"] / ours_us,
            **row,
        }
        for name, row in found.items()
    ]


def plot(report: Report, path: str) -> None:
    """Bars from zero, a panel for each model, the floor as a line through all of them."""
    models = list(dict.fromkeys(row["model"] for row in report.rows))
    figure, axes = plots.canvas(1, len(models), (6.2 * len(models), 4))
    for panel, model in zip(axes[0], models, strict=True):
        shown = [row for row in report.rows if row["model"] == model]
        names = [row["who"] for row in shown]
        colour = plots.colours(names)
        panel.barh(names, [row["time_ms"] for row in shown], color=[colour[name] for name in names])
        for place, row in enumerate(shown):
            label = f" {row['time_ms']:.3g} ms" + ("" if row["who"] == FLOOR else f", {row['of_floor']:.1f} x floor")
            panel.text(row["time_ms"], place, label, va="center", fontsize=8)
        panel.axvline(next(row["time_ms"] for row in shown if row["who"] == FLOOR), color="0.5", lw=0.8, ls="--")
        panel.invert_yaxis()
        longest = max(row["time_ms"] for row in shown)
        panel.set(xlim=(0, longest * 1.4), xlabel="ms, lower is better")
        panel.set_title(f"{model}: {shown[0]['tensors']} tensors, {shown[0]['mb']:.3g} MB", fontsize=10)
        if panel is not axes[0][0]:
            panel.set_yticklabels([])
    header = report.header
    where = f"{header['ranks']} ranks on {header['hosts']} host" + "s" * (header["hosts"] > 1)
    plots.finish(figure, f"Averaging a model's gradients (float32), {where}", header, path)


def on_hosts(options: argparse.Namespace) -> None:
    """The same, by ranks on hosts of their own."""
    if reason := why_not():
        print(f"bench/gradients.py: skipped: {reason}")
        return
    with Network(options.hosts) as network:
        network.shape(options.rate)
        program = [sys.executable, *sys.argv, "--hosts", "0"]
        sys.exit(subprocess.run(network.mpirun(program, 1), stdin=subprocess.DEVNULL).returncode)


def main() -> None:
    """Measure model by model."""
    made = parser(__doc__, runs=7)
    made.add_argument("--only", nargs="+", metavar="NAME", help=f"these rows, {NUMPY} and {FLOOR} only")
    made.add_argument("--hosts", type=int, default=0, metavar="H", help="start a rank on each of so many, as root")
    made.add_argument("--rate", type=int, default=1000, metavar="MBIT", help="of their links (1000)")
    options = arguments(made)
    if options.hosts:
        on_hosts(options)
        return
    rr.init()
    hosts = len(set(rr.info().hosts))
    note = f"median of {options.runs} runs, the rows in turns, of the slowest rank; 1 MB = 1e6 bytes{missing()}"
    report = Report("gradients", about(hosts=hosts), COLUMNS, is_printing(), note, state)
    selects = (reducers, horovod) if has("horovod") else (reducers,)
    base: dict[str, tuple[float, float]] = {}
    for select, model in [(select, model) for select in selects for model in options.models]:
        gradients = Gradients(MODELS[model]())
        compared = select(gradients)
        if options.only:
            compared = {name: each for name, each in compared.items() if name in (NUMPY, FLOOR, *options.only)}
        found = measured(compared, gradients, options.runs, seconds_per_run(options, SECONDS_PER_RUN))
        if select is reducers:
            base[model] = found[FLOOR]["time_us"], found[NUMPY]["time_us"]
        for row in rows(model, gradients, found, *base[model]):
            report.add(row)
        report.label()
        gc.collect()  # what DDP made holds the gradients of the model before
    report.header["fusion_buffer_bytes"] = rr.info().fusion_buffer_bytes
    stop_gloo()
    report.finish(options, plot)


if __name__ == "__main__":
    main()
