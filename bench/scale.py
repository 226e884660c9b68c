"""All-reduce and negotiation on hundreds of hosts, in virtual time: the code that will run, on a simulated network.

    python bench/scale.py --hosts 8,64,512 --per-host 8 --latency-us 20 --gbits 100
    python bench/scale.py --hosts 8,64,512 --per-host 1 --sizes 1000000 100000000 --json scale.json --plot scale.png

Every simulated rank runs the real generators of ringreduce/collectives and the real negotiation; what is computed is
time: see ringreduce/transport/simulated.py for what takes how long, and what is not modelled. Of the ranks of a host,
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
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import plots
from common import Column, Report, machine, parse, parser
from models import resnet50

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import direct, doubling, halving, hierarchical, ring
from ringreduce.collectives.overlap import AnyOf, Running, overlapped
from ringreduce.collectives.shared import Part
from ringreduce.cost_model import (
    BUCKETS_IN_FLIGHT,
    LARGE_BYTES,
    MANY,
    Constants,
    Plan,
    choose,
    plan,
    predict_us,
    segment_bytes,
)
from ringreduce.execution.signature import Signature, TensorSignature
from ringreduce.negotiation.negotiator import Group, Negotiator
from ringreduce.negotiation.protocol import decode, encode
from ringreduce.ops import Sum
from ringreduce.transport.base import Steps, Transport
from ringreduce.transport.counters import group_bytes
from ringreduce.transport.simulated import Cluster, Costs
from ringreduce.transport.subset import channels
from ringreduce.transport.window import Region

SIZES = (4096, 65536, 1_000_000, 100_000_000)
SLOT_BYTES = 1 << 20
BATCHES, CAPACITY = 13, 256
LARGEST_BYTES = 1 << 30
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
    made.add_argument("--taken", action="store_true", help="simulate only what the model takes")
    made.add_argument("--full", action="store_true", help="simulate all ranks of a host")
    options = parse(made)
    options.hosts = [int(each) for each in options.hosts or ([4] if options.quick else [8, 64, 512])]
    options.sizes = options.sizes or ([65536] if options.quick else list(SIZES))
    return options


def numbers(text: str) -> list[float]:
    """Of `8,64,512`."""
    return [float(each) for each in text.split(",")]


def costs_of(constants: Constants, **more: Any) -> Costs:
    """What the cost model's constants mean for simulated ranks: a message is sent, and received, and has a latency."""
    message_us = max(0.0, constants.message_us - Costs.local_us) / 2
    latency_us = max(0.0, constants.wire_us - 2 * message_us)
    local_gbs, copy_gbs = constants.message_gbs, constants.copy_gbs
    return Costs(
        latency_us, 8 * constants.wire_gbs, message_us=message_us, local_gbs=local_gbs, copy_gbs=copy_gbs, **more
    )


class Reducing:
    """What each simulated rank runs, as execution/allreduce does; layout: the host of each rank, simulated or not."""

    def __init__(
        self, algorithm: str, layout: Sequence[int], constants: Constants, made: Plan, cluster: Cluster
    ) -> None:
        self.algorithm, self.made, self.cluster = algorithm, made, cluster
        self.chunks = min(layout.count(host) for host in set(layout))
        self.reduction = cluster.reduction(Sum, TABLE["float32"], len(layout))
        self.segment_bytes = segment_bytes(constants)
        self.flat = np.zeros(LARGEST_BYTES // 4, np.float32)  # of all ranks: nothing is written
        self.own: dict[int, tuple[hierarchical.Hierarchy, Region]] = {}

    def steps(self, rank: int, nbytes: int) -> Steps[None]:
        """One all-reduce, on one rank."""
        length = self.made.unit_bytes // 4
        units = [self.flat[low : min(low + length, nbytes // 4)] for low in range(0, nbytes // 4, length)]
        own = channels(self.cluster.transport(rank), range(self.cluster.size), 0)
        if self.algorithm != "hierarchical":
            collectives = (self._one(unit, own[number % BUCKETS_IN_FLIGHT]) for number, unit in enumerate(units))
            return overlapped(collectives, BUCKETS_IN_FLIGHT)
        hosts = list(self.cluster.hosts)
        if rank not in self.own:
            local = hosts[:rank].count(hosts[rank])
            hierarchy = hierarchical.Hierarchy(own, hosts, local, self.made.halves)
            hierarchy.chunks = self.chunks
            self.own[rank] = hierarchy, self.cluster.region(rank, SLOT_BYTES)
        hierarchy, region = self.own[rank]
        parts = [[Part(unit, unit)] for unit in units]
        return hierarchical.allreduce(parts, region, hierarchy, self.reduction, self.segment_bytes)

    def _one(self, unit: Any, channel: Transport) -> Steps[None]:
        if self.algorithm == "doubling":
            return doubling.allreduce(unit, channel, self.reduction)
        collective = {"ring": ring, "halving": halving, "direct": direct}[self.algorithm]
        return collective.allreduce(unit, channel, self.reduction, self.segment_bytes)


def simulated_us(algorithm: str, nbytes: int, layout: Sequence[int], constants: Constants, made: Plan) -> float:
    """One all-reduce on a network that has these constants, all ranks simulated."""
    cluster = Cluster(layout, costs_of(constants), carries=False)
    reducing = Reducing(algorithm, layout, constants, made, cluster)
    cluster.run(lambda rank: reducing.steps(rank, nbytes))
    return cluster.seconds * 1e6


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

    def is_alike(self, algorithm: str) -> bool:
        """True when one rank stands for all: counted from itself, each does the same at the same time.

        Not so in `halving`, where some chunks go beyond the last one, and are two messages.
        """
        halves = algorithm == "halving" or plan(algorithm, tuple(self.layout), self.constants).halves
        one_each = self.local == (self.mirrors if algorithm == "hierarchical" else 1)
        circular = not halves and (algorithm != "doubling" or not self.hosts & (self.hosts - 1))
        return one_each and circular and not (self.options.full or self.options.jitter_us)

    def algorithms(self) -> list[str]:
        """Those that can be used here."""
        few = ["direct"] if len(self.layout) <= MANY else []
        return [*(["hierarchical"] if self.local > 1 else []), "ring", "halving", *few, "doubling"]

    def messages(self, algorithm: str, nbytes: int) -> float:
        """How many messages a simulation takes, about."""
        hierarchic = algorithm == "hierarchical"
        made, segment = plan(algorithm, tuple(self.layout), self.constants), segment_bytes(self.constants)
        ranks = self.hosts * (self.local // self.mirrors if hierarchic else self.local)
        ranks = 1 if self.is_alike(algorithm) else ranks
        size = self.hosts if hierarchic else len(self.layout)
        units, chunk = max(1.0, nbytes / made.unit_bytes), min(nbytes, made.unit_bytes)
        chunk /= self.local if hierarchic else 1
        if algorithm == "halving" or made.halves:
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
            made = plan(algorithm, tuple(layout), constants)
            row: dict[str, Any] = {"hosts": self.hosts, "per_host": self.local, "gbits": self.costs.gbits}
            row |= {"size": nbytes, "who": f"  {algorithm}{' halving' if made.halves else ''}", "wrong": None}
            row |= {"model_us": predict_us(algorithm, nbytes, layout, constants), "unit": made.unit_bytes / (1 << 20)}
            row |= {"taken": "<--" if algorithm == taken else "", "time_us": None, "share": None}
            if algorithm == "hierarchical":
                row["copies"] = COPIES * nbytes / (1e3 * constants.copy_gbs) / bound_us
            times = 1  # a longer buffer is some shorter ones, each of whom begins anew: no less than it takes
            while self.messages(algorithm, nbytes // times) > most and nbytes // times >= 16 * made.unit_bytes:
                times *= 2
            left_out = self.options.taken and algorithm != taken
            if not left_out and self.messages(algorithm, nbytes // times) <= most:
                started = time.perf_counter()
                cluster = self.cluster(
                    self.mirrors if algorithm == "hierarchical" else 1, alike=self.is_alike(algorithm)
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
        made = plan(algorithm, tuple(layout), self.constants)
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


class Training:
    """The real negotiators of all ranks, over simulated control messages; `reducing` moves what is ready, if there."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, size = cluster, cluster.size
        self.reducing: Reducing | None = None
        blocks = [np.zeros(group_bytes(CAPACITY), np.uint8) for _ in range(size)]
        self.groups: dict[int, Group] = {}
        self.negotiators = []
        for rank, host in enumerate(cluster.hosts):
            group = self.groups[host] = self.groups.get(host) or Group(range(size), cluster.hosts, rank)
            own = [blocks[each] for each in group.ranks]
            options = {"fence": lambda: None, "send": self._sender(rank), "resubmit": lambda _: None}
            self.negotiators.append(
                Negotiator(0, range(size), rank, size, group, own, CAPACITY, **options)  # type: ignore[arg-type]
            )
        shapes = resnet50()[::-1]
        tensors = [TensorSignature(f"layer{k}.weight", "float32", shape, "cpu") for k, shape in enumerate(shapes)]
        self.signatures = [Signature("allreduce", each.name, (each,)) for each in tensors]
        self.counts = [math.prod(shape) for shape in shapes]
        self.batches = np.array_split(np.arange(len(shapes)), BATCHES)

    def _sender(self, source: int) -> Callable[[Any, Sequence[int]], None]:
        def send(message: Any, ranks: Sequence[int]) -> None:
            content = encode(message)
            for rank in ranks:
                if rank != source:
                    self.cluster.send_control(source, content, rank)

        return send

    def data(self, rank: int) -> Steps[None]:
        """Reduce all batches, one after the other."""
        for batch in self.batches:
            yield from self._reduce(rank, batch)

    def _reduce(self, rank: int, batch: Any) -> Steps[None]:
        if self.reducing is not None:
            yield from self.reducing.steps(rank, 4 * sum(self.counts[k] for k in batch))

    def step(self, rank: int) -> Steps[None]:
        """Submit all tensors, a batch when the one before is ready, as an engine does; reduce what is ready."""
        negotiator, cluster = self.negotiators[rank], self.cluster
        neighbours = [each for each in self.groups[cluster.hosts[rank]].ranks if each != rank]
        coming, queue, missing = list(self.batches), deque[Running](), 0
        while coming or missing or queue:
            moved = False
            if coming and not missing:
                missing, moved = len(coming[0]), True
                negotiator.announce([self._submission(k) for k in coming[0]])
            for source, content in cluster.recv_control(rank):
                negotiator.receive(source, decode(content))
                moved = True
            moved |= negotiator.poll()
            while (entry := negotiator.next()) is not None:
                missing -= len(getattr(entry, "new", entry))
                moved = True
                if not missing:
                    queue.append(Running(self._reduce(rank, coming.pop(0))))
            if moved:
                for each in neighbours:
                    cluster.wake(each)
            if queue:
                moved |= queue[0].advance()
            if queue and queue[0].ended:
                queue.popleft()
            elif not moved:
                waits = [queue[0].request] if queue and queue[0].request is not None else []
                yield AnyOf([cluster.mail(rank), *waits])

    def _submission(self, k: int) -> Any:
        return SimpleNamespace(signature=self.signatures[k], line="", waits=False, submitted_s=time.monotonic())


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
        report.add(job.training_step())
    report.finish(options, draw)


if __name__ == "__main__":
    main()
