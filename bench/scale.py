"""All-reduce and negotiation on hundreds of hosts, in virtual time: the code that will run, on a simulated network.

    python bench/scale.py --hosts 8,64,512 --per-host 8 --latency-us 20 --gbits 100
    python bench/scale.py --hosts 8,64,512 --per-host 1 --sizes 1000000 100000000 --json scale.json --plot scale.png

Every simulated rank runs the real generators of ringreduce/collectives and the real negotiation; what is computed is
time: see ringreduce/transport/simulated.py for what takes how long, and what is not modelled. Of the ranks of a host,
which do the same at the same time, one is simulated; `--full` simulates them all.

An algorithm that would send more than `--most` messages is left out: `model` says what the cost model predicts for it.

Columns: time of one all-reduce; `share`: of the time that its host's wire needs at least for 2 (H - 1) / H of the
buffer; `model`: the cost model's time; `taken`: what the model takes. For negotiation: a step of ResNet-50, 161 known
tensors in 13 batches, alone: `sent` control messages of the busiest rank a step, its work, and the slowest rank's time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import plots
from common import Column, Report, machine, parse, parser

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import direct, doubling, halving, hierarchical, ring
from ringreduce.collectives.overlap import overlapped
from ringreduce.collectives.shared import Part
from ringreduce.cost_model import BUCKETS_IN_FLIGHT, MANY, Constants, Plan, choose, plan, segment_bytes
from ringreduce.execution.signature import Signature, TensorSignature
from ringreduce.negotiation.negotiator import Group, Negotiator
from ringreduce.negotiation.protocol import decode, encode
from ringreduce.ops import Sum
from ringreduce.transport.base import Steps
from ringreduce.transport.counters import group_bytes
from ringreduce.transport.simulated import Cluster, Costs
from ringreduce.transport.subset import channels

SIZES = (4096, 65536, 1_000_000, 100_000_000)
SLOT_BYTES = 1 << 20
TENSORS, BATCHES, CAPACITY = 161, 13, 256
COLUMNS = (
    Column("hosts", "hosts", "", 6, "d"),
    Column("per_host", "ranks", "a host", 8, "d"),
    Column("gbits", "wire", "Gbit/s", 8, "g"),
    Column("size", "size", "B", 12, "d"),
    Column("who", "  who", width=16, left=True),
    Column("time_us", "time", "us", 11, ".0f"),
    Column("share", "share", "of wire", 9, ".3f"),
    Column("model_us", "model", "us", 11, ".0f"),
    Column("unit", "unit", "MiB", 6, ".1f"),
    Column("taken", "taken", width=7),
    Column("messages", "sent", "a rank", 8, ".0f"),
    Column("work_us", "work", "us", 9, ".0f"),
    Column("spent_s", "spent", "s", 7, ".1f"),
)


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__, runs=1)
    made.add_argument("--hosts", type=numbers, default=None, metavar="H,H", help="(8,64,512)")
    made.add_argument("--per-host", type=int, default=8, metavar="R", help="ranks on each host (8)")
    made.add_argument("--latency-us", type=float, default=20.0, help="from a host's wire to another's (20)")
    made.add_argument("--gbits", type=numbers, default=[100.0], metavar="G,G", help="of a host's wire, each way (100)")
    made.add_argument("--copy-gbs", type=float, default=25.0, help="a rank's copies, while all its host's copy (25)")
    made.add_argument("--message-us", type=float, default=5.0, help="a rank's time to send or receive a message (5)")
    made.add_argument("--jitter-us", type=float, default=0.0, help="mean random delay of a message (0)")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--sizes", nargs="+", type=int, default=None, metavar="N", help="bytes (4 KiB to 100 MB)")
    made.add_argument("--most", type=int, default=400_000, help="messages that a simulation may take (400000)")
    made.add_argument("--full", action="store_true", help="simulate all ranks of a host")
    options = parse(made)
    options.hosts = [int(each) for each in options.hosts or ([4] if options.quick else [8, 64, 512])]
    options.sizes = options.sizes or ([65536] if options.quick else list(SIZES))
    return options


def numbers(text: str) -> list[float]:
    """Of `8,64,512`."""
    return [float(each) for each in text.split(",")]


class Job:
    """Simulated hosts at one rate, and what the cost model knows of them."""

    def __init__(self, hosts: int, gbits: float, options: argparse.Namespace) -> None:
        self.hosts, self.local, self.options = hosts, options.per_host, options
        self.costs = Costs(options.latency_us, gbits, message_us=options.message_us, copy_gbs=options.copy_gbs)
        self.costs = Costs(**{**vars(self.costs), "jitter_us": options.jitter_us})
        self.mirrors = 1 if options.full else self.local
        self.layout = [host for host in range(hosts) for _ in range(self.local)]
        message_us = 2 * options.message_us + self.costs.local_us
        wire_us = 2 * options.message_us + options.latency_us
        self.constants = Constants(options.copy_gbs, message_us, self.costs.local_gbs, wire_us, gbits / 8)

    def cluster(self, carries: bool = False) -> Cluster:
        """A new one, at time 0."""
        ranks = [host for host in range(self.hosts) for _ in range(self.local // self.mirrors)]
        return Cluster(ranks, self.costs, seed=self.options.seed, carries=carries, mirrors=self.mirrors)

    def algorithms(self) -> list[str]:
        """Those that can be used here."""
        few = ["direct"] if len(self.layout) <= MANY else []
        return [*(["hierarchical"] if self.local > 1 else []), "ring", "halving", *few, "doubling"]

    def messages(self, algorithm: str, nbytes: int, plan: Plan) -> float:
        """How many messages a simulation takes, about."""
        ranks = self.hosts * (self.local // self.mirrors if algorithm == "hierarchical" else self.local)
        units, segment = max(1.0, nbytes / plan.unit_bytes), segment_bytes(self.constants)
        chunk = min(nbytes, plan.unit_bytes) / (self.local if algorithm == "hierarchical" else 1)
        size = self.hosts if algorithm == "hierarchical" else self.hosts * self.local
        if algorithm == "halving" or plan.halves:
            return ranks * units * (3 * math.log2(size) + 2 * chunk / segment)
        if algorithm == "doubling":
            return ranks * units * math.log2(size)
        return ranks * units * 2 * size * max(1, math.ceil(chunk / size / segment))

    def program(self, algorithm: str, nbytes: int, plan: Plan, cluster: Cluster) -> Callable[[int], Steps[None]]:
        """What each rank runs: as execution/allreduce does."""
        reduction = cluster.reduction(Sum, TABLE["float32"], len(self.layout))
        flat, segment = np.zeros(nbytes // 4, np.float32), segment_bytes(self.constants)
        length = plan.unit_bytes // 4
        units = [flat[low : low + length] for low in range(0, flat.size, length)]
        ranks = list(cluster.hosts)

        def across(rank: int) -> Steps[None]:
            hierarchy = hierarchical.Hierarchy(
                channels(cluster.transport(rank), range(len(ranks)), 0), ranks, rank % (self.local // self.mirrors)
            )
            hierarchy.across = halving.allreduce if plan.halves else ring.allreduce
            hierarchy.chunks = self.local
            parts = [[Part(unit, unit)] for unit in units]
            return hierarchical.allreduce(parts, cluster.region(rank, SLOT_BYTES), hierarchy, reduction, segment)

        def by_messages(rank: int) -> Steps[None]:
            own = channels(cluster.transport(rank), range(len(ranks)), 0)

            def one(unit: Any, number: int) -> Steps[None]:
                channel = own[number % BUCKETS_IN_FLIGHT]
                if algorithm == "doubling":
                    return doubling.allreduce(unit, channel, reduction)
                return {"ring": ring, "halving": halving, "direct": direct}[algorithm].allreduce(
                    unit, channel, reduction, segment
                )

            return overlapped((one(unit, number) for number, unit in enumerate(units)), BUCKETS_IN_FLIGHT)

        return across if algorithm == "hierarchical" else by_messages

    def rows(self, nbytes: int) -> list[dict[str, Any]]:
        """All algorithms for one size."""
        taken = choose(nbytes, nbytes, self.layout, self.algorithms(), self.constants)
        bound_us = 2 * nbytes * (self.hosts - 1) / self.hosts / (125 * self.costs.gbits)
        found = []
        for algorithm in self.algorithms():
            made = plan(algorithm, nbytes, self.layout, self.constants)
            who = f"  {algorithm}" + (" halving" if made.halves else "")
            row: dict[str, Any] = {"hosts": self.hosts, "per_host": self.local, "gbits": self.costs.gbits}
            row |= {"size": nbytes, "who": who[:16], "model_us": made.us, "unit": made.unit_bytes / (1 << 20)}
            row |= {"taken": "<--" if algorithm == taken else "", "time_us": None, "share": None, "wrong": None}
            if self.messages(algorithm, nbytes, made) <= self.options.most:
                started = time.perf_counter()
                cluster = self.cluster()
                if algorithm != "hierarchical" and self.mirrors > 1:  # all ranks talk to each other
                    cluster = Cluster(self.layout, self.costs, seed=self.options.seed, carries=False)
                cluster.run(self.program(algorithm, nbytes, made, cluster))
                time_us = cluster.seconds * 1e6
                row |= {"time_us": time_us, "share": bound_us / time_us, "spent_s": time.perf_counter() - started}
                row["messages"] = sum(cluster.sent.values()) / cluster.size
            found.append(row)
        return found

    def negotiation(self) -> dict[str, Any]:
        """A step of known tensors, negotiated alone, by all ranks, after a first one."""
        started = time.perf_counter()
        cluster = Cluster(self.layout, self.costs, seed=self.options.seed)
        negotiating = Negotiating(cluster)
        for _ in range(2):
            before_us, sent, handled = cluster.seconds * 1e6, list(cluster.controls), list(cluster.handled)
            cluster.run(negotiating.step)
        most = max(after - before for after, before in zip(cluster.controls, sent, strict=True))
        work = [
            (after - before + other - one) * self.costs.message_us
            for after, before, other, one in zip(cluster.controls, sent, cluster.handled, handled, strict=True)
        ]
        row = {"hosts": self.hosts, "per_host": self.local, "gbits": self.costs.gbits, "who": "  negotiation"}
        row |= {"time_us": cluster.seconds * 1e6 - before_us, "messages": most, "work_us": max(work), "wrong": None}
        return {**row, "size": 0, "taken": "", "spent_s": time.perf_counter() - started}


class Negotiating:
    """The real negotiators of all ranks, over simulated control messages."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, size = cluster, cluster.size
        self.ready = [0] * size
        blocks = [np.zeros(group_bytes(CAPACITY), np.uint8) for _ in range(size)]
        groups: dict[int, Group] = {}
        self.negotiators = []
        for rank, host in enumerate(cluster.hosts):
            group = groups[host] = groups.get(host) or Group(range(size), cluster.hosts, rank)
            own = [blocks[each] for each in group.ranks]
            options = {"fence": lambda: None, "send": self._sender(rank), "resubmit": lambda _: None}
            self.negotiators.append(
                Negotiator(0, range(size), rank, size, group, own, CAPACITY, **options)  # type: ignore[arg-type]
            )
        self.hosts = groups
        self.tensors = [
            Signature(
                "allreduce", f"layer{k}.weight", (TensorSignature(f"layer{k}.weight", "float32", (64, k), "cpu"),)
            )
            for k in range(TENSORS)
        ]

    def _sender(self, source: int) -> Callable[[Any, Sequence[int]], None]:
        def send(message: Any, ranks: Sequence[int]) -> None:
            content = encode(message)
            for rank in ranks:
                if rank != source:
                    self.cluster.send_control(source, content, rank)

        return send

    def step(self, rank: int) -> Steps[None]:
        """Submit all tensors, batch by batch; each when the one before is ready, as an engine's thread does."""
        negotiator, cluster = self.negotiators[rank], self.cluster
        neighbours = [each for each in self.hosts[cluster.hosts[rank]].ranks if each != rank]
        for batch in np.array_split(np.arange(TENSORS), BATCHES):
            negotiator.announce(
                [
                    SimpleNamespace(signature=self.tensors[k], line="", waits=False, submitted_s=time.monotonic())  # type: ignore[misc]
                    for k in batch
                ]
            )
            missing, moved = len(batch), True
            while missing:
                for source, content in cluster.recv_control(rank):
                    negotiator.receive(source, decode(content))
                    moved = True
                moved |= negotiator.poll()
                while (entry := negotiator.next()) is not None:
                    missing -= len(getattr(entry, "new", entry))
                    moved = True
                if moved:
                    for each in neighbours:
                        cluster.wake(each)
                moved = False
                if missing:
                    yield cluster.mail(rank)


def draw(report: Report, path: str) -> None:
    """The share of the wire over size: a panel for each number of hosts."""
    rows = [row for row in report.rows if row.get("share")]
    places = list(dict.fromkeys((row["hosts"], row["per_host"], row["gbits"]) for row in rows))
    names = list(dict.fromkeys(row["who"].split()[0] for row in rows))
    colour = plots.colours(names)
    figure, axes = plots.canvas(1, len(places), (1.5 + 3.4 * len(places), 4.2), sharey=True)
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


def main() -> None:
    """Simulate and print."""
    options = arguments()
    note = (
        f"simulated: {options.latency_us:g} us, {options.message_us:g} us a message, copies {options.copy_gbs:g} GB/s"
    )
    report = Report("scale", machine(), COLUMNS, True, note)
    for hosts, gbits in itertools.product(options.hosts, options.gbits):
        job = Job(hosts, gbits, options)
        for nbytes in options.sizes:
            for row in job.rows(nbytes):
                report.add(row)
        report.add(job.negotiation())
    report.finish(options, draw)


if __name__ == "__main__":
    main()
