"""Four hosts of which one has a slow link, or two have a slow link between them. Run it as root, alone.

    python bench/slow_links.py                       # 1000 Mbit/s, and 100 where it is slow: about a minute

The hosts are network namespaces, see `bench/network.py`. Rows, for each place of the slow link: `allreduce_` with the
hosts in the order that init() has found, and in that of their ranks (`RINGREDUCE_COSTS` is set: nothing is measured).
Columns: median time of one all-reduce on the slowest rank; `bound`, by hand: a ring sends 2 (H - 1) / H of the buffer
over each of its links, at the rate of the slowest; `of bound`: bound over time; `#wrong` elements. Below a row is what
`info().links` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import Column, Report, flag, machine, main
from network import Network, why_not

HOSTS = 4
PLACES = ("nowhere", "host 2", "hosts 0 and 1")
COLUMNS = (
    Column("place", "slow", width=15, left=True),
    Column("order", "order", "", 10),
    Column("size", "size", "B", 10, "d"),
    Column("time_ms", "time", "ms", 9, ".0f"),
    Column("bound_ms", "bound", "ms", 9, ".0f"),
    Column("of_bound", "of bound", "", 10, ".2f"),
    Column("wrong", "#wrong", "", 8, "d"),
)


def work(size: int, runs: int, result: str) -> None:
    """One rank: the median time, and what init() has found."""
    import numpy as np

    import ringreduce as rr

    rr.init()
    buffer = np.empty(size // 4, np.float32)
    times = []
    for _ in range(1 + runs):
        buffer[:] = rr.rank() + 1
        rr.barrier()
        began_s = time.perf_counter()
        rr.allreduce_(buffer, op=rr.Sum)
        times.append(time.perf_counter() - began_s)
    found = rr.allgather_object((statistics.median(times[1:]), int((buffer != sum(range(HOSTS + 1))).sum())))
    if rr.rank() == 0:
        row = {"time_ms": max(s for s, _ in found) * 1e3, "wrong": sum(n for _, n in found), "links": rr.info().links}
        Path(result).write_text(json.dumps(row))
    rr.shutdown()


def run(network: Network, size: int, runs: int, measures: bool) -> dict[str, Any]:
    """What the ranks found."""
    program = [sys.executable, __file__, "--size", str(size), "--runs", str(runs), "--worker"]
    return network.run(program, variables={} if measures else {"RINGREDUCE_COSTS": "wire_us=60"})


def bench(options: argparse.Namespace, report: Report) -> None:
    """Place by place."""
    for place in PLACES:
        with Network(HOSTS) as network:
            network.shape(options.rate)
            if place == "host 2":
                network.shape(options.slow, network.names[2:3])
            if place == "hosts 0 and 1":
                network.shape_between(0, 1, options.rate, options.slow)
            for order in ("found", "ranks'"):
                found = run(network, options.size, options.runs, order == "found")
                passes = place == "host 2" or (place == "hosts 0 and 1" and order != "found")
                rate = options.slow if passes else options.rate
                bound_ms = 2 * (HOSTS - 1) / HOSTS * options.size * 8 / (rate * 1e6) * 1e3
                row = {"place": place, "order": order, "size": options.size, "bound_ms": bound_ms, **found}
                report.add({**row, "of_bound": bound_ms / found["time_ms"]})
                if order == "found":
                    report.say(f"#   {found['links'].replace('-' + network.tag, '') or 'all links alike'}")


if __name__ == "__main__":
    flags = [
        flag("--size", 4 << 20, 1 << 20, metavar="BYTES", help="of the buffer (4 MiB)"),
        flag("--rate", 1000, metavar="MBIT", help="of a link (1000)"),
        flag("--slow", 100, metavar="MBIT", help="of the slow one (100)"),
        flag("--worker", "", help=argparse.SUPPRESS),
    ]
    note = "median of {runs} runs, of the slowest rank"
    main(
        "slow_links",
        __doc__,
        COLUMNS,
        bench,
        flags,
        runs=3,
        note=note,
        header=lambda options: {"hosts": HOSTS, "Mbit/s": options.rate, "slow": options.slow, **machine()},
        worker=lambda options: work(options.size, options.runs, options.worker),
        why_not=why_not,
    )
