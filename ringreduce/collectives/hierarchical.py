"""All-reduce over hosts with several ranks each: shared memory inside a host, the wire for each local rank's chunk.

Two hosts with two ranks each; a unit has as many chunks as the smallest host has ranks, here `a` and `b`:

                    host 0: rank 0   rank 1        host 1: rank 2   rank 3
    reduce-scatter         a01          b01               a23          b23     through slots of shared memory
    across                 a01 <-------------- rank 0 and 2 ---------> a23     over the wire: only that chunk
                                        b01 <-- rank 1 and 3 --------> b23
    allgather              A  B     A  B                  A  B     A  B        through slots of shared memory

So each byte crosses a host's wire once each way, as if the host were one rank, and all its ranks drive the wire. Ranks
beyond the number of chunks only pack and copy. What goes across is a ring's or halving's affair.

A slot is as small as a cache; a unit, which may fill many slots, is as long as latency and rate of the wire demand.
Some units are on the wire at a time, while another one is packed or copied, in an order that is the same for all ranks:

    reduce-scatter 0, 1, 2, 3 · allgather 0 · reduce-scatter 4 · allgather 1 · reduce-scatter 5 · ...

Source: Horovod's hierarchical allreduce, which copies to one rank of each host; here all take part.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import halving, quantized, ring
from ringreduce.collectives.cost_model import UNITS_AHEAD
from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.overlap import until_ended
from ringreduce.collectives.shared import COPY, DONE, PACK, REDUCE, BufferPair, OnPhase, spans_of
from ringreduce.collectives.shared_halves import allgather, reduce_scatter
from ringreduce.transport.base import Steps, Task, Transport
from ringreduce.transport.subset import SubsetTransport
from ringreduce.transport.window import Region

Across = Callable[..., Steps[None]]  # ring.allreduce, halving's, or quantized's


class Hierarchy:
    """Who does what, for the ranks of `channels`: hosts[r] is rank r's host; local_index: this rank's, on its.

    halved_bytes: buffers up to this length are halved across; longer ones go around a ring.
    order:        the ranks as they stand around a ring; each host's sorted.
    """

    def __init__(
        self,
        channels: Sequence[Transport],
        hosts: Sequence[int],
        local_index: int,
        halved_bytes: float = 0,
        order: Sequence[int] = (),
    ) -> None:
        by_host: dict[int, list[int]] = {}
        for r in order or range(len(hosts)):
            by_host.setdefault(hosts[r], []).append(r)
        members = list(by_host.values())
        self.halved_bytes = halved_bytes
        self.chunks = min(len(each) for each in members)  # of a unit
        self.transports: list[Transport] = []  # one for each unit in flight; none for a rank that owns no chunk
        if local_index < self.chunks:
            across = [each[local_index] for each in members]
            self.transports = [SubsetTransport(each, across, 0) for each in channels[:UNITS_AHEAD]]
        self._memory: dict[tuple[int, str], Any] = {}

    def memory(self, unit: int, use: str, count: int, dtype: np.dtype[Any]) -> Any:
        """`count` elements, kept for the next unit that is in flight in this one's place."""
        place = unit % UNITS_AHEAD, use
        if place not in self._memory or self._memory[place].nbytes < count * dtype.itemsize:
            self._memory[place] = np.empty(count * dtype.itemsize, np.uint8)
        return self._memory[place][: count * dtype.itemsize].view(dtype)


def allreduce(
    units: Sequence[Sequence[BufferPair]],
    region: Region,
    hierarchy: Hierarchy,
    reduction: Reduction,
    segment_bytes: int = ring.SEGMENT_BYTES,
    watch: OnPhase = lambda number, phase: None,
) -> Steps[None]:
    """Reduce the parts of all units over all ranks of all hosts; every rank gets the same bits.

    units: of any length, the same on all ranks;  watch: see shared.py.
    Cost:  over each host's wire 2 n (H - 1) / H elements each way, with H hosts; 2 (H - 1) messages a unit, or with
           halving 2 log2 H, of partial results in `sum_type`, or as its `wire` says. Memory: the region's, and for
           each unit in flight its chunk, and half of it with halving.
    """
    under_way: deque[_Unit] = deque()
    halves = sum(part.source.nbytes for unit in units for part in unit) <= hierarchy.halved_bytes
    across = halving.allreduce if halves else ring.allreduce
    if reduction.wire is not None:
        across = quantized.allreduce

    def wires() -> list[Task[None]]:
        return [each.crossing for each in under_way]

    def poll(number: int, phase: int) -> None:
        for each in wires():
            each.advance()

    for number in range(len(units) + UNITS_AHEAD):
        if number >= UNITS_AHEAD and under_way:
            yield from until_ended(under_way[0].crossing, wires())
            unit = under_way.popleft()
            watch(unit.number, COPY)
            gather = allgather(unit.finished_pieces, unit.targets, region, poll)
            yield from until_ended(Task(gather), wires())
            watch(unit.number, DONE)
        if number < len(units):
            watch(number, PACK)
            unit = _Unit(number, units[number], region.rank, region.size, hierarchy, reduction)
            scatter = reduce_scatter(unit.sources, unit.partial_pieces, region, reduction.part(), poll)
            yield from until_ended(Task(scatter), wires())
            watch(number, REDUCE)
            unit.crossing = Task(unit.cross(hierarchy, across, segment_bytes))
            under_way.append(unit)
            poll(number, REDUCE)


class _Unit:
    """What travels at once, and this rank's chunk of it: its host's sums, then the finished elements."""

    def __init__(
        self, number: int, parts: Sequence[BufferPair], rank: int, size: int, hierarchy: Hierarchy, reduction: Reduction
    ) -> None:
        self.number, self.reduction = number, reduction.of_bucket(number)
        self.crossing: Task[None]
        spans = spans_of(parts, hierarchy.chunks)
        self.sources = [[each.source for each in spans if each.owner == owner] for owner in range(size)]
        self.targets = [[each.target for each in spans if each.owner == owner] for owner in range(size)]
        lengths = [each.size for each in self.sources[rank]]
        if reduction.in_place and len(lengths) == 1:  # what crosses the wire is where it belongs
            self.partial = self.finished = self.targets[rank].pop()
        else:
            self.partial = self.finished = hierarchy.memory(number, "partial", sum(lengths), reduction.sum_type)
            if not reduction.in_place:
                storage = reduction.element.storage
                self.finished = hierarchy.memory(number, "finished", sum(lengths), storage)
        self.partial_pieces, self.finished_pieces = (_cut(each, lengths) for each in (self.partial, self.finished))

    def cross(self, hierarchy: Hierarchy, across: Across, segment_bytes: int) -> Steps[None]:
        """Reduce the chunk over the hosts."""
        if not self.partial.size or not hierarchy.transports:
            return
        transport = hierarchy.transports[self.number % UNITS_AHEAD]
        segment = min(max(1, segment_bytes // self.partial.itemsize), self.partial.size)
        most = max(ring.RECEIVES_AHEAD * segment, self.partial.size // 2 + transport.size)
        workspace = ring.Workspace(
            self.partial, hierarchy.memory(self.number, "scratch", most, self.reduction.sum_type)
        )
        yield from across(self.finished, transport, self.reduction, segment_bytes, workspace)


def _cut(chunk: Any, lengths: Sequence[int]) -> list[Any]:
    """Pieces of these lengths, one after the other."""
    return [chunk[end - length : end] for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)]
