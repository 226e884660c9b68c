"""All-reduce among the ranks of one host through memory that they share (transport/window.py). No messages.

Data goes through small slots, so that it stays in the processor's caches. Each rank owns one chunk of a slot. Per slot,
with two ranks, `a` and `b` the chunks of rank 0 and rank 1:

    rank 0's gradients  rank 0's slot   rank 1's slot   rank 1's gradients
         a0 b0              -- b0           a1 --             a1 b1         pack: all but the rank's own chunk
         A  b0              A  b0           a1 B              a1 B          sum the own chunk from the others' slots
         A  B       <----   A  b0           a1 B      ---->   A  B          copy the others' chunks from their slots

Each rank reads its gradients once and writes them once; everything else stays in caches. With P ranks each packs
n (P - 1) / P elements, sums n / P of every rank's, and copies n (P - 1) / P.

Between the phases a rank waits for the others' flags. To wait less, it interleaves the work on three slots:

    sequence number i:     pack slot i + 1  ·  copy out of slot i - 1  ·  sum slot i

So four slots suffice, without a flag for "I have read it": before a rank packs slot i + 1 it has copied out of slot
i - 2; so all ranks had summed i - 2, and each before that had copied out of i - 3, whose memory is packed now.

A short slot is not worth two waits: every rank packs all of it, and sums all of it (`is_one_shot`).

Every element is summed in rank order, whatever the slots: same inputs, same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringreduce.cost_model import is_one_shot
from ringreduce.kernels.copying import Reader, Writer
from ringreduce.ops import Reduction
from ringreduce.partition import chunk_bounds
from ringreduce.transport.base import Steps
from ringreduce.transport.window import PACKED, SUMMED, Flags, Region

PACK, REDUCE, COPY, DONE = range(4)  # phases of a slot, as `Watch` reports them
Watch = Callable[[int, int], None]
WHOLE_BYTES = 32 << 10
"""Pieces of a chunk at least this long on average are summed one by one in place; shorter ones cost less packed."""


class Part(NamedTuple):
    """Contiguous elements, where from and where to: both 1-D, of equal length and of `element.storage`."""

    source: Any
    target: Any


class Cut(NamedTuple):
    """A piece of one part in one rank's chunk: low:high of the slot, first:last of the part."""

    owner: int
    part: int
    low: int
    high: int
    first: int
    last: int


@functools.lru_cache(maxsize=4096)
def cut(lengths: tuple[int, ...], size: int) -> tuple[Cut, ...]:
    """Cut parts of these lengths, consecutive in a slot, at the bounds of `size` chunks.

    >>> [tuple(each) for each in cut((3, 2), 2)]
    [(0, 0, 0, 3, 0, 3), (1, 1, 3, 5, 0, 2)]
    """
    bounds = chunk_bounds(sum(lengths), size)
    cuts = []
    start, owner = 0, 0
    for part, length in enumerate(lengths):
        low, end = start, start + length
        while low < end:
            while bounds[owner + 1] <= low:
                owner += 1
            high = min(end, bounds[owner + 1])
            cuts.append(Cut(owner, part, low, high, low - start, high - start))
            low = high
        start = end
    return tuple(cuts)


def copy_out(cuts: Sequence[Cut], slots: Sequence[Any], parts: Sequence[Part], reader: Reader) -> None:
    """Copy finished chunks from their owners' slots into the targets."""
    read = reader.read
    for owner, part, low, high, first, last in cuts:
        read(slots[owner][low:high], parts[part].target[first:last])


def pack(parts: Sequence[Part], slot: Any, writer: Writer) -> int:
    """Copy all parts into a slot; returns the number of elements."""
    low = 0
    for source, _ in parts:
        high = low + source.size
        writer.write(source, slot[low:high])
        low = high
    return low


def allreduce(
    slots: Sequence[Sequence[Part]], region: Region, reduction: Reduction, watch: Watch = lambda number, phase: None
) -> Steps[None]:
    """Reduce the parts of all slots over all ranks of the host; every rank gets the same bits.

    slots:  each at most `region.slot_bytes` long, alike on all ranks.
    watch:  called with a slot's number and phase when that begins; DONE: its targets hold the results.
    Cost:   2 waits a slot; see above. Memory: the region's.
    Source: Open MPI's coll/sm and MPICH's release-gather, which do this for one slot.
    """
    if len(slots) == 1 and is_one_shot(sum([part.source.nbytes for part in slots[0]]), region.size):
        yield from with_one_wait([_WholeSlot(slots[0], region, reduction)], region, watch)
        return
    yield from pipelined([_Slot(parts, region, reduction) for parts in slots], region, watch)


def one_shot(source: Any, target: Any, region: Region, reduction: Reduction) -> Steps[None]:
    """As `allreduce` of one array for which `is_one_shot` is true."""
    sequence = region.sequence
    region.sequence = sequence + 1
    slots = [each[: source.size] for each in region.slots(sequence, reduction.element.storage)]
    slots[region.rank][...] = source
    region.publish(PACKED, sequence)
    if not region.arrived(PACKED, sequence):
        yield region.arrival(PACKED, sequence)
    reduction.reduce_parts(slots, target)


class SlotWork(Protocol):
    """What one rank does with one slot, in the memory that the sequence number selects."""

    def pack(self, sequence: int) -> None:
        """Copy into this rank's slot what others will sum, and publish PACKED."""

    def sum(self, sequence: int) -> None:
        """Reduce this rank's chunk into its slot, and publish SUMMED; all ranks have published PACKED."""

    def copy_out(self, sequence: int) -> None:
        """Copy the finished chunks from their owners' slots; all ranks have published SUMMED."""


class HalfWork(Protocol):
    """What one rank does with one slot that is read once; all slots stay unchanged while others read them."""

    def pack(self, sequence: int) -> None:
        """Copy into this rank's slot what others will read, if anything, and publish PACKED."""

    def read(self, sequence: int) -> None:
        """Sum or copy what the others have packed; all ranks have published PACKED."""


def pipelined(slots: Sequence[SlotWork], flags: Flags, watch: Watch) -> Steps[None]:
    """Run all slots through their three phases, in the order for which four slots of memory suffice; see above."""
    first, count = flags.sequence, len(slots)
    flags.sequence += count
    for number in range(-1, count + 1):
        if number + 1 < count:
            watch(number + 1, PACK)
            slots[number + 1].pack(first + number + 1)
            watch(number + 1, REDUCE)
        if number > 0:
            sequence = first + number - 1
            if not flags.arrived(SUMMED, sequence):
                yield flags.arrival(SUMMED, sequence)
            watch(number - 1, COPY)
            slots[number - 1].copy_out(sequence)
            watch(number - 1, DONE)
        if 0 <= number < count:
            sequence = first + number
            if not flags.arrived(PACKED, sequence):
                yield flags.arrival(PACKED, sequence)
            slots[number].sum(sequence)


def with_one_wait(slots: Sequence[HalfWork], flags: Flags, watch: Watch) -> Steps[None]:
    """Run all slots through their two phases: pack slot i + 1, wait for all to have packed slot i, read that.

    Four slots of memory suffice here too: before a rank packs slot i + 2, it has seen that all have packed slot i; each
    had then read slot i - 2, whose memory is packed now. So a rank that has nothing to pack publishes PACKED, too.
    """
    first, count = flags.sequence, len(slots)
    flags.sequence += count
    for number in range(-1, count):
        if number + 1 < count:
            watch(number + 1, PACK)
            slots[number + 1].pack(first + number + 1)
            watch(number + 1, REDUCE)
        if number >= 0:
            if not flags.arrived(PACKED, first + number):
                yield flags.arrival(PACKED, first + number)
            watch(number, COPY)
            slots[number].read(first + number)
            watch(number, DONE)


class _WholeSlot:
    """See `HalfWork`: every rank sums all of it."""

    def __init__(self, parts: Sequence[Part], region: Region, reduction: Reduction) -> None:
        self.parts, self.region, self.reduction = parts, region, reduction
        self.length = 0

    def pack(self, sequence: int) -> None:
        region, dtype = self.region, self.reduction.element.storage
        self.length = pack(self.parts, region.slots(sequence, dtype)[region.rank], region.writer)
        region.publish(PACKED, sequence)

    def read(self, sequence: int) -> None:
        dtype = self.reduction.element.storage
        chunks = [each[: self.length] for each in self.region.slots(sequence, dtype)]
        if len(self.parts) == 1:
            self.reduction.reduce_parts(chunks, self.parts[0].target)
            return
        reduced = np.empty(self.length, dtype)
        self.reduction.reduce_parts(chunks, reduced)
        low = 0
        for _, target in self.parts:
            high = low + target.size
            target[...] = reduced[low:high]
            low = high


class _Slot:
    """See `SlotWork`."""

    def __init__(self, parts: Sequence[Part], region: Region, reduction: Reduction) -> None:
        self.parts, self.region, self.reduction = parts, region, reduction
        self.dtype = reduction.element.storage
        self.cuts = cut(tuple(part.source.size for part in parts), region.size)
        self.own = [each for each in self.cuts if each.owner == region.rank]
        own_bytes = sum([each.high - each.low for each in self.own]) * self.dtype.itemsize
        # the own chunk is summed in place, piece by piece; else it is packed, and summed at once
        self.in_place = own_bytes >= WHOLE_BYTES * len(self.own) or len(self.own) == 1

    def pack(self, sequence: int) -> None:
        region = self.region
        mine = region.slots(sequence, self.dtype)[region.rank]
        write = region.writer.write
        skipped = region.rank if self.in_place else -1
        for owner, part, low, high, first, last in self.cuts:
            if owner != skipped:
                write(self.parts[part].source[first:last], mine[low:high])
        region.publish(PACKED, sequence)

    def sum(self, sequence: int) -> None:
        region = self.region
        slots = region.slots(sequence, self.dtype)
        mine = slots[region.rank]
        if self.in_place:
            for _, part, low, high, first, last in self.own:
                chunks = [each[low:high] for each in slots]
                target = self.parts[part].target[first:last]
                chunks[region.rank] = self.parts[part].source[first:last]
                self.reduction.reduce_parts(chunks, target)
                region.writer.write(target, mine[low:high])
        elif self.own:
            low, high = self.own[0].low, self.own[-1].high
            self.reduction.reduce_parts([each[low:high] for each in slots], mine[low:high])
            copy_out(self.own, slots, self.parts, region.reader)
        region.publish(SUMMED, sequence)

    def copy_out(self, sequence: int) -> None:
        region = self.region
        others = [each for each in self.cuts if each.owner != region.rank]
        copy_out(others, region.slots(sequence, self.dtype), self.parts, region.reader)
