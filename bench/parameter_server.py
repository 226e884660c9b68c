"""A ring against a parameter server, on hosts with links of one rate. Run it as root, alone.

    python bench/parameter_server.py                 # 2, 4 and 8 workers; 1, 2 and 4 servers; 100 Mbit/s: a minute

The classical comparison: with W workers and S servers a server's link carries W / S times the parameters each way in
a step, and a worker's once; in a ring each carries 2 (W - 1) / W times them, however many there are. The hosts are
network namespaces, one rank on each, see `bench/network.py`; both directions of a link have the rate.

A step pulls all parameters and pushes all gradients, in step (mode sync); of the ring, it is one grouped all-reduce.
Nothing is computed. Columns: `step`, median of the slowest worker; `busiest`, what passed the busiest link in its
busier direction, a step; `by hand`, by the formulas above; `bound`, its time at the link's rate; `#wrong` elements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plots
from common import Column, Report, flag, machine, main
from network import Network, why_not

ARRAYS = 16
STATISTICS = Path("/sys/class/net/eth0/statistics")
COLUMNS = (
    Column("workers", "workers", "", 8, "d"),
    Column("who", "  by", width=14, left=True),
    Column("size", "size", "B", 10, "d"),
    Column("time_ms", "step", "ms", 9, ".0f"),
    Column("busiest", "busiest", "B", 11, ".0f"),
    Column("by_hand", "by hand", "B", 11, ".0f"),
    Column("bound_ms", "bound", "ms", 9, ".0f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def passed() -> list[int]:
    """Bytes that this host's link has carried, each way."""
    return [int((STATISTICS / f"{way}_bytes").read_text()) for way in ("tx", "rx")]


def work(size: int, steps: int, servers: int, result: str) -> None:
    """One rank."""
    import numpy as np

    import ringreduce as rr

    rr.init()
    workers = rr.size() - servers
    zeros = {f"w{k}": np.zeros(size // 4 // ARRAYS, np.float32) for k in range(ARRAYS)}
    gradients = {name: each + rr.rank() + 1 for name, each in zeros.items()}

    def ring() -> dict[str, Any]:
        reduced = rr.grouped_allreduce(list(gradients.values()), names=list(gradients))
        return {name: total + each for (name, total), each in zip(parameters.items(), reduced, strict=True)}

    def by_servers() -> dict[str, Any]:
        worker.push(gradients)
        return worker.pull()  # type: ignore[no-any-return]

    def measured(step: Callable[[], dict[str, Any]]) -> list[float]:
        nonlocal parameters
        times = []
        for _ in range(steps):
            began_s = time.perf_counter()
            parameters = step()
            times.append(time.perf_counter() - began_s)
        return times[1:]

    def add(parameters: dict[str, Any], gradients: dict[str, Any]) -> None:
        for name, gradient in gradients.items():
            parameters[name] += gradient

    parameters, times = zeros, [0.0]
    before = passed()
    if rr.rank() >= workers:
        server = rr.ps.Server(add, servers=servers)
        rr.barrier()
        before = passed()
        server.serve()
    elif servers:
        with rr.ps.Worker(zeros, servers=servers) as worker:
            rr.barrier()  # the values to start from have come
            before = passed()
            times = measured(by_servers)
    else:
        times = measured(ring)
    most = max(now - then for now, then in zip(passed(), before, strict=True)) / steps
    expected = steps * sum(range(1, workers + 1)) / workers
    is_worker = rr.rank() < workers
    wrong = sum(int((np.abs(each - expected) > 1e-4 * expected).sum()) for each in parameters.values()) * is_worker
    found = rr.allgather_object((statistics.median(times) * 1e3, most, wrong))
    if rr.rank() == 0:
        slowest, busiest, wrongs = zip(*found, strict=True)
        Path(result).write_text(json.dumps({"time_ms": max(slowest), "busiest": max(busiest), "wrong": sum(wrongs)}))
    rr.shutdown()


def run(workers: int, servers: int, options: argparse.Namespace) -> dict[str, Any]:
    """What the ranks found, on hosts of their own."""
    with Network(workers + servers) as network:
        network.shape(options.rate, inbound=True)
        program = [sys.executable, __file__, "--size", str(options.size), "--runs", str(options.runs)]
        found = network.run([*program, "--servers", str(servers), "--worker"])
    by_hand = options.size * (max(1, workers / servers) if servers else 2 * (workers - 1) / workers)
    return {**found, "by_hand": by_hand, "bound_ms": by_hand * 8 / (options.rate * 1e6) * 1e3 * (2 if servers else 1)}


def plot(report: Report, path: str) -> None:
    """Bytes on the busiest link, and the time of a step, over the number of workers."""
    names = list(dict.fromkeys(row["who"].strip() for row in report.rows))
    figure, axes = plots.canvas(1, 2, (9, 4))
    shades = ["#d62728", "#1f77b4", "#6baed6", "#9ecae1"]
    for name, colour in zip(names, shades, strict=False):
        mine = [row for row in report.rows if row["who"].strip() == name]
        across = [row["workers"] for row in mine]
        axes[0][0].plot(across, [row["busiest"] / row["size"] for row in mine], "o-", color=colour, label=name)
        axes[0][1].plot(across, [row["time_ms"] for row in mine], "o-", color=colour, label=name)
    axes[0][0].set_ylabel("bytes on the busiest link, each way,\nin sizes of the parameters", fontsize=8)
    axes[0][1].set_ylabel("a step (ms)", fontsize=8)
    for panel in axes[0]:
        panel.set(xlabel="workers", ylim=(0, None))
        panel.set_xticks(sorted({row["workers"] for row in report.rows}))
        panel.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    title = "Ring against parameter server: what the busiest link carries, and what a step takes (lower is better)"
    plots.finish(figure, title, report.header, path)


def bench(options: argparse.Namespace, report: Report) -> None:
    """Number of workers by number of workers."""
    for workers in options.workers:
        for servers in options.servers:
            who = f"{servers} server{'s' * (servers > 1)}" if servers else "ring"
            report.add({"workers": workers, "who": f"  {who}", "size": options.size, **run(workers, servers, options)})


if __name__ == "__main__":
    flags = [
        flag("--size", 2 << 20, 1 << 18, metavar="BYTES", help="of the parameters (2 MiB)"),
        flag("--rate", 100, metavar="MBIT", help="of a link, each way (100)"),
        flag("--workers", [2, 4, 8], [2], metavar="N", help="how many (2 4 8)"),
        flag("--servers", [0, 1, 2, 4], [0, 1], metavar="N", help="how many; 0: a ring (0 1 2 4)"),
        flag("--worker", "", help=argparse.SUPPRESS),
    ]
    note = "median of {runs} steps, of the slowest worker, in mode sync"
    main(
        "parameter_server",
        __doc__,
        COLUMNS,
        bench,
        flags,
        runs=5,
        note=note,
        header=lambda options: {"Mbit/s": options.rate, **machine()},
        worker=lambda options: work(options.size, options.runs + 1, options.servers[0], options.worker),
        why_not=why_not,
        plot=plot,
    )
