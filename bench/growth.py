"""How the cost grows: with the ranks, with the number of tensors; and how far the cost model can be trusted.

    python bench/growth.py                                                      # without ringrun; about four minutes
    python bench/growth.py --hosts-json hosts.json --json growth.json --plot growth.png

Starts `ringrun -np P` for each number of ranks by itself, all on this machine: ranks may outnumber its cores. Parts:

    tensors    a step with 1 to 10,000 tensors of 1 KiB (1,000 with more than 4 ranks): submitted one by one by their
               names, grouped, DDP on gloo (less its backward alone), and an MPI_Allreduce for each
    buffer     one buffer by each of our algorithms, called directly: measured, and what the cost model of
               ringreduce.collectives.cost_model says, with the constants that it measured at the start
    hosts      the same for hosts, measured by bench/hosts.py (--hosts-json): that file's rows, at one rate
    predicted  flat ring and hierarchical for up to 10,000 ranks, by that model with those constants: nothing measured

Columns: time of a step or an all-reduce (median of several runs, the rows in turns, of the slowest rank); predicted:
what the model says; measured over predicted; elements that are wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plots
from common import IN_TURNS, Column, Report, flag, main, run_job, seconds_per_run
from contenders import missing

from ringreduce.collectives.cost_model import Constants, predict_us

TIMEOUT_S = 900
SECONDS_PER_RUN = 0.1
RANKS, TENSORS = [2, 4, 8, 16], [1, 10, 100, 1000, 10_000]
FEW_RANKS, MANY_TENSORS = 4, 1000
SIZES = [1 << 10, 64 << 10, 1 << 20, 16 << 20]
PREDICTED_RANKS = (4, 8, 16, 32, 64, 128, 256, 1000, 3000, 10_000)
PREDICTED_PER_HOST = (2, 8)
PREDICTED_SIZES = (64 << 10, 4 << 20, 16 << 20)
COMPARED = ("ring", "hierarchical")
COLUMNS = (
    Column("part", "part", width=10, left=True),
    Column("ranks", "ranks", "", 6, "d"),
    Column("per_host", "ranks", "a host", 9, "d"),
    Column("tensors", "tensors", "", 8, "d"),
    Column("size", "size", "B", 10, "d"),
    Column("who", "  who", width=23, left=True),
    Column("time_us", "time", "us", 11, ".0f"),
    Column("predicted_us", "predicted", "us", 12, ".0f"),
    Column("off", "measured", "/pred.", 9, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def measure(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """What that many ranks find."""
    with tempfile.TemporaryDirectory(prefix="ringbench-") as folder:
        result = Path(folder) / "rows.json"
        worker = [str(Path(__file__).with_name("growth_worker.py")), "--json", str(result)]
        counts = [each for each in options.tensors if each <= MANY_TENSORS or ranks <= FEW_RANKS]
        sizes, tensors = map(str, SIZES[: 2 if options.quick else None]), map(str, counts)
        worker += [
            "--seconds",
            str(seconds_per_run(options, SECONDS_PER_RUN)),
            "--runs",
            str(options.runs),
            "--sizes",
            *sizes,
            "--tensors",
            *tensors,
        ]
        run_job(["-np", str(ranks)], worker, TIMEOUT_S)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def hosts_rows(path: str, mbit: int) -> tuple[list[dict[str, Any]], str]:
    """Of bench/hosts.py: the rows that have a prediction, and the constants it was made with."""
    rows = [row for row in json.loads(Path(path).read_text())["rows"] if row["mbit"] == mbit]
    if not rows:
        sys.exit(f"bench/growth.py: {path} has no rows of {mbit} Mbit/s; pass --mbit, or run bench/hosts.py with it")
    kept = ("per_host", "size", "who", "time_us", "wrong", "predicted_us")
    found = [
        {"part": "hosts", "ranks": row["hosts"] * row["per_host"], "tensors": 1} | {key: row[key] for key in kept}
        for row in rows
        if "predicted_us" in row
    ]
    widest = max(rows, key=lambda row: (row["per_host"], row["hosts"]))
    return found, widest["constants"]


def predictions(constants: Constants, quick: bool) -> list[dict[str, Any]]:
    """Flat ring against hierarchical; rank r is on host r // per_host."""
    counts = (8, 16, 1000) if quick else PREDICTED_RANKS
    rows = []
    for per_host in PREDICTED_PER_HOST:
        for size in PREDICTED_SIZES:
            for ranks in (each for each in counts if each > per_host):
                hosts = tuple(rank // per_host for rank in range(ranks))
                place = {"part": "predicted", "ranks": ranks, "per_host": per_host, "tensors": 1, "size": size}
                for name in COMPARED:
                    predicted = predict_us(name, size, hosts, constants)
                    rows.append({**place, "who": name, "predicted_us": predicted, "wrong": None})
    return rows


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row as the table has it."""
    off = row["time_us"] / row["predicted_us"] if row.get("predicted_us") and row.get("time_us") else None
    return {**row, "who": f"  {row['who'].strip()}", "off": off}


def plot(report: Report, path: str) -> None:
    """Three pictures: tensors, the model on one host, the model on many."""
    rows = [{**row, "who": row["who"].strip()} for row in report.rows]
    ranks = list(dict.fromkeys(row["ranks"] for row in rows if row["part"] == "tensors"))
    sizes = list(dict.fromkeys(row["size"] for row in rows if row["part"] == "buffer"))
    width = max(len(ranks), len(sizes), len(PREDICTED_SIZES))
    figure, axes = plots.canvas(3, width, (3.6 * width, 10.5))
    for panel in axes.flat:
        panel.set_visible(False)
    for panel, count in zip(axes[0], ranks, strict=False):
        _lines(panel, [r for r in rows if r["part"] == "tensors" and r["ranks"] == count], "tensors")
        panel.set_title(f"measured: {count} ranks, tensors of 1 KiB", fontsize=9)
        panel.set_xlabel("tensors in a step", fontsize=8)
    for panel, size in zip(axes[1], sizes, strict=False):
        here = [row for row in rows if row["part"] == "buffer" and row["size"] == size and "predicted_us" in row]
        _lines(panel, here, "ranks", predicted=True)
        panel.set_title(f"measured (dots) and model (dashes):\none host, {plots.bytes_text(size)}", fontsize=9)
        panel.set_xlabel("ranks", fontsize=8)
    for panel, size in zip(axes[2], PREDICTED_SIZES, strict=False):
        _hosts_panel(panel, rows, size)
    for line in axes:
        line[0].set_ylabel("µs, lower is better", fontsize=8)
    figure.supxlabel(f"the model's constants across hosts: {report.header['constants_of_predictions']}", fontsize=7)
    plots.finish(figure, "How the cost grows: with tensors, with ranks, with hosts", report.header, path)


def _lines(panel: Any, rows: Sequence[dict[str, Any]], key: str, predicted: bool = False) -> None:
    names = list(dict.fromkeys(row["who"] for row in rows))
    colour = plots.colours(names)
    for name in names:
        mine = [row for row in rows if row["who"] == name]
        across, times = [row[key] for row in mine], [row["time_us"] for row in mine]
        panel.plot(across, times, "o" if predicted else "o-", ms=4, label=name, color=colour[name])
        if predicted:
            panel.plot(across, [row["predicted_us"] for row in mine], "--", lw=1, color=colour[name])
    _style(panel)
    panel.set_xticks(sorted({row[key] for row in rows}), [f"{each:,}" for each in sorted({r[key] for r in rows})])
    panel.minorticks_off()


def _hosts_panel(panel: Any, rows: Sequence[dict[str, Any]], size: int) -> None:
    here = [row for row in rows if row["part"] in ("hosts", "predicted") and row["size"] == size]
    colour = plots.colours(COMPARED)
    for per_host, style in zip(sorted({row["per_host"] for row in here}), (":", "--", "-"), strict=False):
        for name in COMPARED:
            mine = [row for row in here if row["who"] == name and row["per_host"] == per_host]
            model = [row for row in mine if row["part"] == "predicted"]
            dots = [row for row in mine if row["part"] == "hosts"]
            label, points = f"{name}, {per_host} ranks a host", [row["ranks"] for row in model]
            if model:
                panel.plot(points, [r["predicted_us"] for r in model], style, lw=1.2, color=colour[name], label=label)
            if dots:
                label, face = f"measured, {label}", "none" if per_host == 1 else colour[name]
                panel.plot([r["ranks"] for r in dots], [r["time_us"] for r in dots], "o", mfc=face, color=colour[name])
                panel.lines[-1].set_label(label)
    _style(panel)
    panel.set_title(
        f"model (lines) beyond what was measured\n(dots): across hosts, {plots.bytes_text(size)}", fontsize=9
    )
    panel.set_xlabel("ranks", fontsize=8)


def _style(panel: Any) -> None:
    panel.set_visible(True)
    panel.set(xscale="log", yscale="log")
    panel.grid(which="major", alpha=0.3)
    panel.tick_params(which="both", labelsize=8)
    panel.legend(fontsize=6.5)


def bench(options: argparse.Namespace, report: Report) -> None:
    """Measure, then predict."""
    constants = Constants()
    for ranks in options.ranks:
        found = measure(ranks, options)
        report.header |= {name: found["header"][name] for name in ("mpi", "mpi4py", "torch")}
        report.header.setdefault("constants", {})[ranks] = found["constants"]
        constants = Constants.parse(found["constants"])
        for row in found["rows"]:
            report.add(shown(row))
    if options.hosts_json:
        rows, text = hosts_rows(options.hosts_json, options.mbit)
        constants = Constants.parse(text)
        for row in rows:
            report.add(shown(row))
    if options.costs:
        named = Constants.parse(options.costs)
        given = {item.partition("=")[0].strip() for item in options.costs.split(",")}
        constants = dataclasses.replace(constants, **{name: getattr(named, name) for name in given})
    report.header["constants_of_predictions"] = str(constants)
    report.say(f"# predictions by {constants}")
    for row in predictions(constants, options.quick):
        report.add(shown(row))


if __name__ == "__main__":
    flags = [
        flag("--ranks", RANKS, [2, 3], metavar="P", help="(2 4 8 16)"),
        flag("--tensors", TENSORS, [1, 30], metavar="N", help="(1 10 100 1000 10000)"),
        flag("--hosts-json", None, metavar="FILE", help="what bench/hosts.py --json wrote"),
        flag("--mbit", 1000, metavar="RATE", help="its rows of this rate (%(default)s)"),
        flag("--costs", None, metavar="NAME=N,…", help="constants of the model for hosts, such as wire_gbs=10"),
    ]
    note = IN_TURNS + missing()
    main("growth", __doc__, COLUMNS, bench, flags, runs=3, note=note, plot=plot)
