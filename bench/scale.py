"""All-reduce and negotiation on hundreds of hosts, in virtual time: the code that will run, on a simulated network.

    python bench/scale.py --hosts 8,64,512 --per-host 8 --latency-us 20 --gbits 100
    python bench/scale.py --hosts 8,64,512 --per-host 1 --sizes 1000000 100000000 --json scale.json --plot scale.png

Every simulated rank runs the real generators of ringreduce/collectives and the real negotiation; what is computed is
time: see bench/simulated/cluster.py for what takes how long, and what is not modelled. Of the ranks of a host,
which do the same at the same time, one is simulated, and one of all ranks where each does the same counted from itself;
`--full` simulates them all.

An algorithm that would send more than `--most` messages is left out: `model` says what the cost model predicts for it.

Columns: time of one all-reduce; `share`: of the time that its host's wire needs at least for 2 (H - 1) / H of the
buffer; `copies`: what a rank's copies and sums take at least, of the wire's time; `model`: the cost model's time;
`taken`: what the model takes. A buffer of too many messages is simulated in equal parts, one after the other.

`negotiation` is a step of ResNet-50, 161 known tensors in 13 batches, alone: `sent` control messages of the busiest
rank a step, its work, and the slowest rank's time. `ResNet-50 step`: the same while data moves, and what control adds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from typing import Any

import plots
from common import Column, Report, flag, main
from simulated.cluster import Cluster, Costs
from simulation import Reducing, Training, costs_of

from ringreduce.collectives.cost_model import (
    LARGE_BYTES,
    MANY,
    Constants,
    best_units,
    choose,
    predict_us,
    segment_bytes,
)

SIZES = (4096, 65536, 1_000_000, 100_000_000)
COPIES = 2.6  # of a buffer, in which a rank of `hierarchical` reads and writes: packing, sums, copying out
COLUMNS = (
    Column("hosts", "hosts", "", 6, "d"),
    Column("per_host", "ranks", "a host", 8, "d"),
    Column("gbits", "wire", "Gbit/s", 8, "g"),
    Column("size", "size", "B", 12, "d"),
    Column("who", "  who", width=23, left=True),
    Column("time_us", "time", "us", 11, ".0f"),
    Column("share", "share", "of wire", 9, ".3f"),
    Column("copies", "copies", "of wire", 8, ".2f"),
    Column("model_us", "model", "us", 11, ".0f"),
    Column("unit", "unit", "MiB", 6, ".1f"),
    Column("taken", "taken", width=7),
    Column("messages", "sent", "a rank", 8, ".0f"),
    Column("adds", "control", "adds", 8, ".3f"),
    Column("work_us", "work", "us", 9, ".0f"),
    Column("spent_s", "spent", "s", 7, ".1f"),
)


def numbers(text: str) -> list[float]:
    """Of `8,64,512`."""
    return [float(each) for each in text.split(",")]


class Job:
    """Simulated hosts at one rate, and what the cost model knows of them."""

    def __init__(self, hosts: int, gbits: float, options: argparse.Namespace) -> None:
        self.hosts, self.local, self.options = hosts, options.per_host, options
        self.mirrors = 1 if options.full else self.local
        self.layout = [host for host in range(hosts) for _ in range(self.local)]
        message_us = 2 * options.message_us + Costs.local_us
        wire_us = 2 * options.message_us + options.latency_us
        self.constants = Constants(options.copy_gbs, message_us, Costs.local_gbs, wire_us, gbits / 8)
        self.costs = costs_of(self.constants, jitter_us=options.jitter_us)

    def cluster(self, mirrors: int, carries: bool = False, alike: bool = False) -> Cluster:
        """A new one, at time 0."""
        ranks = [host for host in range(self.hosts) for _ in range(self.local // mirrors)]
        return Cluster(ranks, self.costs, seed=self.options.seed, carries=carries, mirrors=mirrors, alike=alike)

    def is_alike(self, algorithm: str, nbytes: int) -> bool:
        """True when one rank stands for all: counted from itself, each does the same at the same time.

        Not so in `halving`, where some chunks go beyond the last one, and are two messages.
        """
        halves = self.halves(algorithm, nbytes)
        one_each = self.local == (self.mirrors if algorithm == "hierarchical" else 1)
        circular = not halves and (algorithm != "doubling" or not self.hosts & (self.hosts - 1))
        return one_each and circular and not (self.options.full or self.options.jitter_us)

    def halves(self, algorithm: str, nbytes: int) -> bool:
        """True when so many bytes are halved between hosts."""
        return (
            algorithm == "halving" or nbytes <= best_units(algorithm, tuple(self.layout), self.constants).halved_bytes
        )

    def algorithms(self) -> list[str]:
        """Those that can be used here."""
        few = ["direct"] if len(self.layout) <= MANY else []
        return [*(["hierarchical"] if self.local > 1 else []), "ring", "halving", *few, "doubling"]

    def messages(self, algorithm: str, nbytes: int) -> float:
        """How many messages a simulation takes, about."""
        hierarchic = algorithm == "hierarchical"
        made, segment = best_units(algorithm, tuple(self.layout), self.constants), segment_bytes(self.constants)
        ranks = self.hosts * (self.local // self.mirrors if hierarchic else self.local)
        ranks = 1 if self.is_alike(algorithm, nbytes) else ranks
        size = self.hosts if hierarchic else len(self.layout)
        units, chunk = max(1.0, nbytes / made.unit_bytes), min(nbytes, made.unit_bytes)
        chunk /= self.local if hierarchic else 1
        if self.halves(algorithm, nbytes):
            return ranks * units * (3 * math.log2(size) + 2 * chunk / segment)
        if algorithm == "doubling":
            return ranks * units * math.log2(size)
        return ranks * units * 2 * size * max(1, math.ceil(chunk / size / segment))

    def rows(self, nbytes: int) -> list[dict[str, Any]]:
        """All algorithms for one size."""
        layout, constants, most = self.layout, self.constants, self.options.most
        taken = choose(nbytes, nbytes, layout, self.algorithms(), constants)
        bound_us = 2 * nbytes * (self.hosts - 1) / self.hosts / (125 * self.costs.gbits)
        found = []
        for algorithm in self.algorithms():
            made = best_units(algorithm, tuple(layout), constants)
            row: dict[str, Any] = {"hosts": self.hosts, "per_host": self.local, "gbits": self.costs.gbits}
            row |= {
                "size": nbytes,
                "who": f"  {algorithm}{' halving' if nbytes <= made.halved_bytes else ''}",
                "wrong": None,
            }
            row |= {"model_us": predict_us(algorithm, nbytes, layout, constants), "unit": made.unit_bytes / (1 << 20)}
            row |= {"taken": "<--" if algorithm == taken else "", "time_us": None, "share": None}
            if algorithm == "hierarchical":
                row["copies"] = COPIES * nbytes / (1e3 * constants.copy_gbs) / bound_us
            times = 1  # a longer buffer is some shorter ones, each of whom begins anew: no less than it takes
            while self.messages(algorithm, nbytes // times) > most and nbytes // times >= 8 * made.unit_bytes:
                times *= 2
            left_out = self.options.taken and algorithm != taken
            if not left_out and self.messages(algorithm, nbytes // times) <= most:
                started = time.perf_counter()
                cluster = self.cluster(
                    self.mirrors if algorithm == "hierarchical" else 1, alike=self.is_alike(algorithm, nbytes)
                )
                reducing, each = Reducing(algorithm, layout, constants, made, cluster), nbytes // times
                cluster.run(lambda rank, one=reducing, each=each: one.steps(rank, each))
                time_us = times * cluster.seconds * 1e6
                row |= {"time_us": time_us, "share": bound_us / time_us, "spent_s": time.perf_counter() - started}
                ranks = 1 if cluster.alike else cluster.size
                row |= {"messages": times * sum(cluster.sent.values()) / ranks, "times": times}
            found.append(row)
        return found

    def negotiation(self) -> dict[str, Any]:
        """A step of known tensors, negotiated alone, by all ranks, after a first one."""
        started = time.perf_counter()
        cluster = self.cluster(1, carries=True)
        training = Training(cluster)
        cluster.run(training.step)
        before_us, sent, handled = cluster.seconds * 1e6, list(cluster.controls), list(cluster.handled)
        cluster.run(training.step)
        most = max(after - before for after, before in zip(cluster.controls, sent, strict=True))
        work = [
            (after - before + other - one) * self.costs.message_us
            for after, before, other, one in zip(cluster.controls, sent, cluster.handled, handled, strict=True)
        ]
        row = {"hosts": self.hosts, "per_host": self.local, "gbits": self.costs.gbits, "who": "  negotiation"}
        row |= {"time_us": cluster.seconds * 1e6 - before_us, "messages": most, "work_us": max(work), "wrong": None}
        return {**row, "size": 0, "taken": "", "spent_s": time.perf_counter() - started}

    def training_step(self) -> dict[str, Any]:
        """A step of known tensors, negotiated while earlier ones travel, and the same without negotiation."""
        started, layout = time.perf_counter(), self.layout
        algorithm = choose(LARGE_BYTES, LARGE_BYTES, layout, self.algorithms(), self.constants)
        made = best_units(algorithm, tuple(layout), self.constants)
        times_us = []
        for negotiated in (False, True):
            cluster = self.cluster(self.mirrors if algorithm == "hierarchical" else 1)
            training = Training(cluster)
            if negotiated:
                cluster.run(training.step)  # the first time, tensors are new
            before_us, sent = cluster.seconds * 1e6, list(cluster.controls)
            training.reducing = Reducing(algorithm, layout, self.constants, made, cluster)
            cluster.run(training.step if negotiated else training.data)
            times_us.append(cluster.seconds * 1e6 - before_us)
        most = max(after - before for after, before in zip(cluster.controls, sent, strict=True))
        row = {"hosts": self.hosts, "per_host": self.local, "gbits": self.costs.gbits, "who": "  ResNet-50 step"}
        row |= {"time_us": times_us[1], "adds": times_us[1] / times_us[0] - 1, "messages": most, "wrong": None}
        nbytes = 4 * sum(training.counts)
        return {**row, "size": nbytes, "taken": "", "spent_s": time.perf_counter() - started}


def draw(report: Report, path: str) -> None:
    """The share of the wire over size: a panel for each number of hosts."""
    rows = [row for row in report.rows if row.get("share")]
    places = list(dict.fromkeys((row["hosts"], row["per_host"], row["gbits"]) for row in rows))
    names = list(dict.fromkeys(row["who"].split()[0] for row in rows))
    colour = plots.colours(names)
    figure, axes = plots.canvas(1, len(places), (1.5 + 3.4 * len(places), 4.2), sharey=True, sharex=True)
    for panel, place in zip(axes[0], places, strict=True):
        here = [row for row in rows if (row["hosts"], row["per_host"], row["gbits"]) == place]
        for name in names:
            mine = [row for row in here if row["who"].split()[0] == name]
            panel.plot([r["size"] for r in mine], [r["share"] for r in mine], "o-", label=name, color=colour[name])
        taken = [row for row in here if row["taken"]]
        style = {"s": 120, "facecolors": "none", "edgecolors": "black", "label": "the model's choice"}
        panel.scatter([row["size"] for row in taken], [row["share"] for row in taken], **style)
        panel.set(xscale="log", ylim=(0, 1.05), xlabel="bytes")
        panel.set_title(f"{place[0]} hosts x {place[1]}, {place[2]:g} Gbit/s", fontsize=9)
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("share of the wire's bound")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    plots.finish(figure, "All-reduce on many hosts, simulated (1 is a full wire)", report.header, path)


def bench(options: argparse.Namespace, report: Report) -> None:
    """Simulate and print."""
    for hosts, gbits in itertools.product(options.hosts, options.gbits):
        job = Job(int(hosts), gbits, options)
        for nbytes in options.sizes:
            for row in job.rows(nbytes):
                report.add(row)
        report.add(job.negotiation())
        report.add(job.training_step())


if __name__ == "__main__":
    flags = [
        flag("--hosts", [8, 64, 512], [4], nargs=None, type=numbers, metavar="H,H", help="(8,64,512)"),
        flag("--per-host", 8, metavar="R", help="ranks on each host (8)"),
        flag("--latency-us", 20.0, help="from a host's wire to another's (20)"),
        flag("--gbits", [100.0], nargs=None, type=numbers, metavar="G,G", help="of a host's wire, each way (100)"),
        flag("--copy-gbs", 25.0, help="a rank's copies, while all its host's copy (25)"),
        flag("--message-us", 5.0, help="a rank's time to send or receive a message (5)"),
        flag("--jitter-us", 0.0, help="mean random delay of a message (0)"),
        flag("--seed", 0),
        flag("--sizes", list(SIZES), [65536], metavar="N", help="bytes (4 KiB to 100 MB)"),
        flag("--most", 400_000, help="messages that a simulation may take (400000)"),
        flag("--taken", False, help="simulate only what the model takes"),
        flag("--full", False, help="simulate all ranks of a host"),
    ]
    note = "simulated: {latency_us:g} us, {message_us:g} us a message, copies {copy_gbs:g} GB/s"
    main("scale", __doc__, COLUMNS, bench, flags, runs=1, note=note, plot=draw)
