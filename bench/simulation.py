"""What simulated ranks do, for bench/scale.py and bench/hosts.py: one all-reduce, or a step of training.

`Reducing` runs the algorithms as execution/allreduce does, `Training` the negotiators of all ranks as an engine does.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from models import resnet50
from simulated.cluster import Cluster, Costs

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import direct, doubling, halving, hierarchical, ring
from ringreduce.collectives.cost_model import BUCKETS_IN_FLIGHT, Constants, Units, segment_bytes
from ringreduce.collectives.ops import Sum
from ringreduce.collectives.overlap import AnyOf, overlapped
from ringreduce.collectives.shared import BufferPair
from ringreduce.execution.plan import Plan
from ringreduce.execution.signature import Signature, TensorSignature
from ringreduce.negotiation.negotiator import Group, Negotiator
from ringreduce.negotiation.protocol import decode, encode
from ringreduce.transport.base import Steps, Task, Transport
from ringreduce.transport.counters import group_bytes
from ringreduce.transport.subset import channels
from ringreduce.transport.window import Region

SLOT_BYTES = 1 << 20
BATCHES, CAPACITY = 13, 256  # of ResNet-50's tensors; of the cache of each rank
LARGEST_BYTES = 1 << 30


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
        self, algorithm: str, layout: Sequence[int], constants: Constants, made: Units, cluster: Cluster
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
            hierarchy = hierarchical.Hierarchy(own, hosts, local, self.made.halved_bytes)
            hierarchy.chunks = self.chunks
            self.own[rank] = hierarchy, self.cluster.region(rank, SLOT_BYTES)
        hierarchy, region = self.own[rank]
        parts = [[BufferPair(unit, unit)] for unit in units]
        return hierarchical.allreduce(parts, region, hierarchy, self.reduction, self.segment_bytes)

    def _one(self, unit: Any, channel: Transport) -> Steps[None]:
        if self.algorithm == "doubling":
            return doubling.allreduce(unit, channel, self.reduction)
        collective = {"ring": ring, "halving": halving, "direct": direct}[self.algorithm]
        return collective.allreduce(unit, channel, self.reduction, self.segment_bytes)


def simulated_us(algorithm: str, nbytes: int, layout: Sequence[int], constants: Constants, made: Units) -> float:
    """One all-reduce on a network that has these constants, all ranks simulated."""
    cluster = Cluster(layout, costs_of(constants), carries=False)
    reducing = Reducing(algorithm, layout, constants, made, cluster)
    cluster.run(lambda rank: reducing.steps(rank, nbytes))
    return cluster.seconds * 1e6


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
        signatures = [Signature("allreduce", each.name, (each,)) for each in tensors]
        self.plans = [[Plan(each) for each in signatures] for _ in range(size)]  # by rank
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
        coming, queue, missing = list(self.batches), deque[Task[None]](), 0
        while coming or missing or queue:
            moved = False
            if coming and not missing:
                missing, moved = len(coming[0]), True
                negotiator.announce([self._submission(rank, k) for k in coming[0]])
            for source, content in cluster.recv_control(rank):
                negotiator.receive(source, decode(content))
                moved = True
            moved |= negotiator.poll()
            while (entry := negotiator.next()) is not None:
                missing -= len(getattr(entry, "new", entry))
                moved = True
                if not missing:
                    queue.append(Task(self._reduce(rank, coming.pop(0))))
            if moved:
                for each in neighbours:
                    cluster.wake(each)
            if queue:
                moved |= queue[0].advance()
            if queue and queue[0].ended:
                queue.popleft()
            elif not moved:
                mail = Task(each for each in [cluster.mail(rank)])
                mail.step()
                yield AnyOf([mail, *itertools.islice(queue, 1)])

    def _submission(self, rank: int, k: int) -> Any:
        plan = self.plans[rank][k]
        of = {"plan": plan, "signature": plan.signature, "key": plan.key}
        return SimpleNamespace(**of, line="", waits=False, submitted_s=time.monotonic(), step=-1)
