"""All-reduce over hosts with several ranks each: shared memory inside a host, rings across, one for each local rank.

Two hosts with two ranks each; a slot has as many chunks as the smallest host has ranks, here `a` and `b`:

                host 0: rank 0   rank 1        host 1: rank 2   rank 3
    pack               a0 b0    a1 b1                 a2 b2    a3 b3       into shared memory
    sum                a01          b01               a23          b23     each rank its chunk, from the others' slots
    ring               a01 <----------- rank 0 and 2 ----> a23             over the wire: only that chunk
                                    b01 <-- rank 1 and 3 ----> b23
    copy               A  B     A  B                  A  B     A  B        from the owners' slots

So each byte crosses a host's wire once each way, as if the host were one rank, and all its ranks drive the wire. Ranks
beyond the number of chunks only pack and copy. Slots overlap: one is on the wire while the next is summed.

No flag says "I have read it": `SLOTS_IN_FLIGHT` slots are in flight, and there are twice as many. A rank packs slot k
once it has finished slot k - SLOTS_IN_FLIGHT; by then every rank had begun that one, and so had finished slot k -
2 SLOTS_IN_FLIGHT, whose memory is packed now.

Source: Horovod's hierarchical allreduce, which copies to one rank of each host; here all take part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.collectives import ring
from ringreduce.collectives.overlap import InOrder, Order, overlapped
from ringreduce.collectives.shared import COPY, DONE, PACK, REDUCE, Part, Slot, Watch, pieces_of
from ringreduce.ops import Average, Reduction, Sum
from ringreduce.transport.base import Steps, Transport
from ringreduce.transport.subset import SubsetTransport
from ringreduce.transport.window import PACKED, SLOTS, SUMMED, Region

SLOTS_IN_FLIGHT = SLOTS // 2


class Hierarchy:
    """Who does what, for the ranks of `channels`: hosts[r] is rank r's host; local_index: this rank's, on its."""

    def __init__(self, channels: Sequence[Transport], hosts: Sequence[int], local_index: int) -> None:
        by_host: dict[int, list[int]] = {}
        for r, host in enumerate(hosts):
            by_host.setdefault(host, []).append(r)
        members = list(by_host.values())
        self.chunks = min(len(each) for each in members)  # of a slot
        self.rings: list[Transport] = []  # this rank's ring, one per slot in flight; none for a rank that owns no chunk
        if local_index < self.chunks:
            across = [each[local_index] for each in members]
            self.rings = [SubsetTransport(channels[k], across, 0) for k in range(SLOTS_IN_FLIGHT)]
        self.order = Order(channels[0].rank)  # this rank publishes SUMMED in order, though slots overlap


def allreduce(
    slots: Sequence[Sequence[Part]],
    region: Region,
    hierarchy: Hierarchy,
    reduction: Reduction,
    segment_bytes: int = ring.SEGMENT_BYTES,
    watch: Watch = lambda number, phase: None,
) -> Steps[None]:
    """Reduce the parts of all slots over all ranks of all hosts; every rank gets the same bits.

    slots: each at most `region.slot_bytes` long, alike on all ranks;  watch: see shared.py.
    Cost:  over each host's wire 2 n (H - 1) / H elements each way, with H hosts; 2 (H - 1) messages a slot. 16-bit
           floats travel as float32 until they are finished. Memory: the region's, and for each slot in flight 4
           segments and, for 16-bit floats, a float32 copy of a chunk.
    """
    first, order = region.sequence, hierarchy.order
    region.sequence += len(slots)
    order.passed = first

    def one(number: int, parts: Sequence[Part]) -> Steps[None]:
        sequence, pieces = first + number, pieces_of(parts, hierarchy.chunks)
        slot = Slot(region, reduction.element.storage, packed=pieces, copied=pieces)
        watch(number, PACK)
        slot.pack(sequence)
        watch(number, REDUCE)
        yield region.arrival(PACKED, sequence)
        own = [each for each in pieces if each.owner == region.rank]
        if own and hierarchy.rings:
            chunks = [each[own[0].low : own[-1].high] for each in region.slots(sequence, slot.dtype)]
            yield from _across(chunks, region.rank, hierarchy.rings[number % SLOTS_IN_FLIGHT], reduction, segment_bytes)
        if order.passed != sequence:
            yield InOrder(order, sequence)
        region.publish(SUMMED, sequence)
        order.passed = sequence + 1
        yield region.arrival(SUMMED, sequence)
        watch(number, COPY)
        slot.copy_out(sequence)
        watch(number, DONE)

    yield from overlapped(itertools.starmap(one, enumerate(slots)), SLOTS_IN_FLIGHT)


def _across(
    chunks: Sequence[Any], mine: int, transport: Transport, reduction: Reduction, segment_bytes: int
) -> Steps[None]:
    """Sum the chunk of the host's ranks, reduce it over the hosts, and leave it in this rank's slot."""
    finished = chunks[mine]
    if reduction.in_place:
        partial = finished
        inside = reduction._replace(op=Sum if reduction.op is Average else reduction.op, postscale=1.0)  # not finished
        inside.reduce_parts(chunks, partial)
    else:
        started = map(reduction.start, chunks)  # copies in `sum_type`
        partial = next(started)
        for other in started:
            reduction.combine(partial, other)
    length = min(max(1, segment_bytes // partial.itemsize), partial.size)
    scratch = np.empty(ring.RECEIVES_AHEAD * length, partial.dtype)
    yield from ring.allreduce(finished, transport, reduction, segment_bytes, ring.Workspace(partial, scratch))
