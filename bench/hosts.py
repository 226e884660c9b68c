"""Across hosts: ours beside MPI_Allreduce and torch gloo, and beside what the wire carries. Run it as root, alone.

    python bench/hosts.py                                                            # all of it: about ten minutes
    python bench/hosts.py --hosts 4 --per-host 1 --rates 1000 --json hosts.json --plot hosts.png
    python bench/hosts.py --hosts 2 4 --per-host 1 --rates 1000 --short                # 4 and 64 KiB: latency

The hosts are network namespaces on this machine, with links whose rate is shaped (`bench/network.py`). They share its
cores and its memory, so the wire is real and the rest is slower than on hosts of their own. Skipped, with the reason
and exit code 0, where there is no root or no iproute2. All that is made is removed again.

Rows, for each number of hosts, of ranks a host, and rate: our algorithms called directly, `allreduce_` (the public
function), MPI_Allreduce, torch gloo; with --short also `ordered()` and `by hand`, twelve lines of mpi4py, and no gloo,
whose thread polls. And as the ceiling, in turns with the others:

    raw TCP               a plain stream from the first host to the second, of as many bytes as an all-reduce over H
                          hosts must send from each: 2 (H - 1) / H of the buffer
    raw TCP, all hosts    such a stream from each host to the next, all at the same time

Columns: time of one all-reduce (median of several runs, of the slowest rank); `share`: the raw stream's time over it;
`sent`: bytes that left the host that sent most, headers and acknowledgements included, counted at its interface;
`of least`: these over 2 (H - 1) / H of the buffer; `#wrong`: elements that differ from the expected sum; `model`,
`simulated`: what the cost model, and our algorithms in virtual time, say of a network with the constants that init()
has measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plots
from common import IN_TURNS, Column, Report, flag, machine, main, seconds_per_run
from contenders import BY_HAND, DTYPES, GLOO, MPI_NAME, ORDERED, PUBLIC, missing
from network import Network, why_not
from simulation import simulated_us

from ringreduce.collectives.cost_model import ALGORITHMS, Constants, Units, best_units, predict_us

SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
WHO = ("ring", "halving", "hierarchical", PUBLIC, MPI_NAME, GLOO)
SHORT_SIZES, SHORT_WHO = (4 << 10, 64 << 10), (MPI_NAME, BY_HAND, "doubling", "direct", ORDERED, PUBLIC)
LONGEST_S = 1.1
TIMEOUT_S = 900
SECONDS_PER_RUN = 0.25
COLUMNS = (
    Column("hosts", "hosts", "", 6, "d"),
    Column("per_host", "ranks", "a host", 9, "d"),
    Column("mbit", "rate", "Mbit/s", 9, "d"),
    Column("size", "size", "B", 10, "d"),
    Column("who", "  who", width=21, left=True),
    Column("time_us", "time", "us", 11, ".0f"),
    Column("share", "share", "of raw", 9, ".3f"),
    Column("model_us", "model", "us", 9, ".0f"),
    Column("simulated_us", "simulated", "us", 10, ".0f"),
    Column("wire_bytes", "sent", "B", 11, ".0f"),
    Column("of_least", "of least", "times", 10, ".3f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def sizes_for(mbit: int, sizes: Sequence[int]) -> list[int]:
    """Those that the wire carries in a reasonable time; always the smallest."""
    return [each for each in sizes if each == min(sizes) or 8 * 2 * each / (mbit * 1e6) <= LONGEST_S]


def measure(network: Network, per_host: int, mbit: int, options: argparse.Namespace) -> dict[str, Any]:
    """What the ranks found at one rate."""
    network.shape(mbit)
    worker = str(Path(__file__).with_name("hosts_worker.py"))
    sizes = [str(each) for each in sizes_for(mbit, options.sizes)]
    seconds = str(seconds_per_run(options, SECONDS_PER_RUN))
    program = [sys.executable, worker, "--seconds", seconds, "--runs", str(options.runs)]
    program += ["--dtype", options.dtype, "--sizes", *sizes, "--who", *options.who, "--json"]
    return network.run(program, per_host, timeout_s=TIMEOUT_S)


def expected(who: str, nbytes: int, hosts: Sequence[int], constants: Constants) -> dict[str, float]:
    """The time of one of our algorithms by the cost model, and simulated, with what init() has measured."""
    if who not in ALGORITHMS:
        return {}
    made = best_units(who, tuple(hosts), constants) if who == "hierarchical" else Units(nbytes)
    return {
        "model_us": predict_us(who, nbytes, hosts, constants, made),
        "simulated_us": simulated_us(who, nbytes, hosts, constants, made),
    }


def plot(report: Report, path: str) -> None:
    """The share of the raw stream over size: a row of panels for each placement of ranks, a column for each rate."""
    places = list(dict.fromkeys((row["hosts"], row["per_host"]) for row in report.rows))
    rates = list(dict.fromkeys(row["mbit"] for row in report.rows))
    names = [name for name in dict.fromkeys(row["who"].strip() for row in report.rows) if name != "raw TCP"]
    size = max(9, 1.5 + 3.2 * len(rates)), 1.6 + 2.4 * len(places)
    colour = plots.colours(names)
    figure, axes = plots.canvas(len(places), len(rates), size, sharey=True, sharex=True)
    for line, (hosts, per_host) in zip(axes, places, strict=True):
        for panel, mbit in zip(line, rates, strict=True):
            here = [r for r in report.rows if (r["hosts"], r["per_host"], r["mbit"]) == (hosts, per_host, mbit)]
            for name in names:
                mine = [row for row in here if row["who"].strip() == name]
                style = "--" if name.startswith("raw") else "o-"
                shares = [row["share"] for row in mine]
                panel.plot([row["size"] for row in mine], shares, style, ms=3, label=name, color=colour[name])
            panel.axhline(1, color="black", lw=0.8, label="raw TCP, one stream")
            panel.set(xscale="log", ylim=(0, 1.15))
            panel.set_title(f"{hosts} hosts x {per_host}, {mbit} Mbit/s", fontsize=9)
            plots.bytes_axis(panel.xaxis)
            panel.tick_params(labelsize=8)
            panel.grid(which="major", alpha=0.3)
        line[0].set_ylabel("share of the raw stream", fontsize=8)
    for panel in axes[-1]:
        panel.set_xlabel("size of the buffer", fontsize=8)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    title = "All-reduce across hosts: share of a raw TCP stream's rate (1 is a full wire; higher is better)"
    plots.finish(figure, title, report.header, path)


def check(options: argparse.Namespace) -> str:
    """What is wrong with the options."""
    options.sizes = options.sizes or list(SHORT_SIZES if options.short else SIZES)
    options.who = options.who or list(SHORT_WHO if options.short else WHO)
    if min(options.hosts) < 2 or min(options.per_host) < 1 or min(options.rates) < 1:
        return "expected --hosts of 2 or more, --per-host and --rates of 1 or more"
    return ""


def bench(options: argparse.Namespace, report: Report) -> None:
    """Placement by placement, rate by rate."""
    for hosts in options.hosts:
        with Network(hosts) as network:
            for per_host, mbit in [(per_host, mbit) for per_host in options.per_host for mbit in options.rates]:
                found = measure(network, per_host, mbit, options)
                report.header |= {name: found["header"][name] for name in ("mpi", "mpi4py", "torch")}
                place = {"hosts": hosts, "per_host": per_host, "mbit": mbit, "constants": found["constants"]}
                for row in found["rows"]:
                    row |= expected(row["who"], row["size"], found["hosts"], Constants.parse(found["constants"]))
                    report.add({**place, "rank_hosts": found["hosts"], **row, "who": f"  {row['who']}"})


if __name__ == "__main__":
    flags = [
        flag("--hosts", [2, 4], [2], metavar="H", help="(2 4)"),
        flag("--per-host", [1, 2], [2], metavar="R", help="ranks on each host (1 2)"),
        flag("--rates", [100, 500, 1000, 2000], [1000], metavar="MBIT", help="(100 500 1000 2000)"),
        flag("--sizes", None, [64 << 10], nargs="+", type=int, metavar="N", help="bytes (64 KiB to 64 MiB)"),
        flag("--who", None, nargs="+", metavar="NAME", help=f"rows ({', '.join(WHO)})"),
        flag("--short", False, help=f"other --sizes and --who: {', '.join(SHORT_WHO)}"),
        flag("--dtype", "float32", choices=DTYPES),
    ]
    note = IN_TURNS + missing()
    main(
        "hosts",
        __doc__,
        COLUMNS,
        bench,
        flags,
        runs=5,
        note=note,
        header=lambda options: {"type": options.dtype, **machine()},
        check=check,
        why_not=why_not,
        plot=plot,
    )
