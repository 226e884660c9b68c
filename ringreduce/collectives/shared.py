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

from ringreduce.collectives.cost_model import is_one_shot
from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.partition import chunk_bounds
from ringreduce.transport.base import Steps
from ringreduce.transport.window import PACKED, SUMMED, Flags, Region

PACK, REDUCE, COPY, DONE = range(4)  # phases of a slot, as `OnPhase` reports them
OnPhase = Callable[[int, int], None]
WHOLE_BYTES = 32 << 10
"""Pieces of a chunk at least this long on average are summed one by one in place; shorter ones cost less packed."""


class BufferPair(NamedTuple):
    """A source and a target of contiguous elements: both 1-D, of equal length and of `element.storage`."""

    source: Any
    target: Any


@functools.lru_cache(maxsize=4096)
def cut(lengths: tuple[int, ...], size: int) -> list[tuple[int, int, int, int, int, int]]:
    """Cut parts of these lengths, consecutive in a slot, at the bounds of `size` chunks.

    Returns: (owner, part, low, high, first, last): low:high of the slot is first:last of the part, in an owner's chunk.

    >>> cut((3, 2), 2)
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
            cuts.append((owner, part, low, high, low - start, high - start))
            low = high
        start = end
    return cuts


def allreduce(
    slots: Sequence[Sequence[BufferPair]],
    region: Region,
    reduction: Reduction,
    watch: OnPhase = lambda number, phase: None,
) -> Steps[None]:
    """Reduce the parts of all slots over all ranks of the host; every rank gets the same bits.

    slots:  each at most `region.piece_bytes(all bytes)` long, the same on all ranks.
    watch:  called with a slot's number and phase when that begins; DONE: its targets hold the results.
    Cost:   2 waits a slot; see above. Memory: the region's.
    Source: Open MPI's coll/sm and MPICH's release-gather, which do this for one slot.
    """
    if len(slots) == 1 and is_one_shot(sum([part.source.nbytes for part in slots[0]]), region.size):
        yield from _packed_one_shot(slots[0], region, reduction, watch)
    else:
        yield from pipelined([_in_chunks(parts, region, reduction) for parts in slots], region, watch)


def _packed_one_shot(parts: Sequence[BufferPair], region: Region, reduction: Reduction, watch: OnPhase) -> Steps[None]:
    watch(0, PACK)
    packed = np.concatenate([source for source, _ in parts])
    watch(0, REDUCE)
    yield from one_shot(packed, packed, region, reduction)
    watch(0, COPY)
    low = 0
    for _, target in parts:
        target[...] = packed[low : low + target.size]
        low += target.size
    watch(0, DONE)


def one_shot(source: Any, target: Any, region: Region, reduction: Reduction, packed: int | None = None) -> Steps[None]:
    """Like `allreduce`, for one array for which `is_one_shot` is true.

    packed: the sequence number of the slot if this rank has already packed and published it.
    """
    sequence = region.sequence if packed is None else packed
    slots = [each[: source.size] for each in region.slots(sequence, source.dtype)]
    if packed is None:
        region.sequence = sequence + 1
        slots[region.rank][...] = source
        region.publish(PACKED, sequence)
    if not region.arrived(PACKED, sequence):
        yield region.arrival(PACKED, sequence)
    reduction.reduce_parts(slots, target)


class SlotWork(Protocol):
    """What one rank does with one slot, in the memory that the sequence number selects."""

    def pack(self, sequence: int) -> None:
        """Copy into this rank's slot what others will read, if anything, and publish PACKED."""

    def sum(self, sequence: int) -> None:
        """Reduce this rank's chunk, and publish SUMMED; all ranks have published PACKED."""

    def copy_out(self, sequence: int) -> None:
        """Copy from their owners' slots what they have finished."""


def pipelined(slots: Sequence[SlotWork], flags: Flags, watch: OnPhase) -> Steps[None]:
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


def with_one_wait(slots: Sequence[SlotWork], flags: Flags, watch: OnPhase) -> Steps[None]:
    """Run slots whose ranks copy nothing out that another rank sums: pack slot i + 1, wait for all to have packed i.

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
            slots[number].sum(first + number)
            watch(number, COPY)
            slots[number].copy_out(first + number)
            watch(number, DONE)


class Span(NamedTuple):
    """Elements low:high of a slot, in its owner's chunk; in the caller's memory from `source` to `target`, if given."""

    owner: int
    low: int
    high: int
    source: Any = None
    target: Any = None


class Slot:
    """See `SlotWork`: from the sources of `packed` and `summed` to the targets of `summed` and `copied`."""

    def __init__(
        self,
        region: Region,
        dtype: np.dtype[Any],
        packed: Sequence[Span] = (),
        summed: Sequence[Span] = (),
        copied: Sequence[Span] = (),
        reduction: Reduction | None = None,
        spreads: bool = True,
    ) -> None:
        """spreads: others copy out what this rank sums."""
        self.region, self.dtype, self.reduction, self.spreads = region, dtype, reduction, spreads
        self.packed, self.summed, self.copied = packed, summed, copied

    def pack(self, sequence: int) -> None:
        """See `SlotWork`."""
        region = self.region
        mine, write = region.slots(sequence, self.dtype)[region.rank], region.write
        for _, low, high, source, _ in self.packed:
            write(source, mine[low:high])
        region.publish(PACKED, sequence)

    def sum(self, sequence: int) -> None:
        """See `SlotWork`; without a source its packed elements are summed, without a target into the slot itself."""
        if self.reduction is None:
            return
        region, rank = self.region, self.region.rank
        slots = region.slots(sequence, self.dtype)
        for _, low, high, source, target in self.summed:
            chunks = [each[low:high] for each in slots]
            mine = chunks[rank]
            if source is not None:
                chunks[rank] = source
            if self.spreads and target is not None:
                self.reduction.reduce_to_two(chunks, target, mine)
            else:
                self.reduction.reduce_parts(chunks, mine if target is None else target)
        region.publish(SUMMED, sequence)

    def copy_out(self, sequence: int) -> None:
        """See `SlotWork`."""
        slots, read = self.region.slots(sequence, self.dtype), self.region.read
        for owner, low, high, _, target in self.copied:
            read(slots[owner][low:high], target)


def spans_of(parts: Sequence[BufferPair], size: int) -> list[Span]:
    """The spans of a slot with `size` chunks."""
    return [
        Span(owner, low, high, parts[part].source[first:last], parts[part].target[first:last])
        for owner, part, low, high, first, last in cut(tuple([part.source.size for part in parts]), size)
    ]


def _in_chunks(parts: Sequence[BufferPair], region: Region, reduction: Reduction) -> Slot:
    spans, dtype = spans_of(parts, region.size), reduction.element.storage
    own = [each for each in spans if each.owner == region.rank]
    length = sum([each.high - each.low for each in own])
    if length * dtype.itemsize >= WHOLE_BYTES * len(own) or len(own) == 1:
        others = [each for each in spans if each.owner != region.rank]
        return Slot(region, dtype, others, own, others, reduction)
    whole = Span(region.rank, own[0].low, own[-1].high)
    return Slot(region, dtype, spans, [whole], spans, reduction)
