"""The halves of the all-reduce in shared memory (shared.py), each on its own, and broadcast. No messages.

A slot holds, for each owner, the next elements of what it owns. With two ranks and two tensors, a and b:

    reduce-scatter   rank 0's slot: -, -, a1, b1     rank 1's slot: a0, b0, -, -     packs all but what it owns itself
                     rank 0 sums a0, b0 of both      rank 1 sums a1, b1              straight into its result
    allgather        rank 0's slot: a0, b0           rank 1's slot: a1, b1           each packs what it owns
                     rank 0 copies a1, b1            rank 1 copies a0, b0            straight into its result
    broadcast        an allgather to which the root alone contributes

Each rank reads its own memory once and writes its results once; everything else stays in caches. One wait a slot, and
four slots suffice: `shared.with_one_wait`. Every operation leaves all ranks with the same sequence number, and done
with all slots but the last two: so the next one, of whatever kind, may begin to pack at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.collectives.shared import Watch, with_one_wait
from ringreduce.fusion import plan
from ringreduce.ops import Reduction
from ringreduce.transport.base import Steps
from ringreduce.transport.window import PACKED, Region

Arrays = Sequence[Any]  # 1-D, contiguous, in host memory
_Pieces = list[tuple[int, Any]]  # where in a slot each begins, and its elements


def reduce_scatter(
    chunks: Sequence[Arrays],
    targets: Arrays,
    region: Region,
    reduction: Reduction,
    watch: Watch = lambda number, phase: None,
) -> Steps[None]:
    """Reduce chunks[r] of all ranks into rank r's targets, in rank order: the bits are those of `shared.allreduce`.

    Shape:  `reduction.element.storage`; chunks have the same lengths on all ranks; targets those of this rank's chunks.
    watch:  as in `shared.allreduce`.
    Cost:   one wait a slot; of n elements a rank packs n (P - 1) / P and sums n / P of every rank's.
    """
    dtype = reduction.element.storage
    capacity = region.slot_bytes // dtype.itemsize // region.size
    by_owner = [_by_slot(each, capacity) for each in chunks]
    results = _by_slot(targets, capacity)
    slots = [
        _ScatteredSlot([_at(each, number) for each in by_owner], _at(results, number), capacity, region, reduction)
        for number in range(max(map(len, by_owner)))
    ]
    yield from with_one_wait(slots, region, watch)


def allgather(
    sources: Arrays, targets: Sequence[Arrays], region: Region, watch: Watch = lambda number, phase: None
) -> Steps[None]:
    """Copy every rank r's sources into targets[r] of all ranks.

    Shape:  any types; targets[r] as rank r's sources, or empty on rank r itself, which then copies nothing.
    watch:  as in `shared.allreduce`.
    Cost:   one wait a slot; a rank packs its own elements, and copies all others once.
    """
    own = _by_slot(_bytes(sources), region.slot_bytes)
    by_owner = [_by_slot(_bytes(each), region.slot_bytes) for each in targets]
    slots = [
        _GatheredSlot(_at(own, number), [_at(each, number) for each in by_owner], region)
        for number in range(max(len(own), *map(len, by_owner)))
    ]
    yield from with_one_wait(slots, region, watch)


def broadcast(arrays: Arrays, root: int, region: Region) -> Steps[None]:
    """Copy the root's arrays into the others'; the root packs, the others read. Cost: as `allgather`."""
    is_root = region.rank == root
    targets: list[Arrays] = [() for _ in range(region.size)]
    if not is_root:
        targets[root] = arrays
    yield from allgather(arrays if is_root else (), targets, region)


def _bytes(arrays: Arrays) -> Arrays:
    return [each.view(np.uint8) for each in arrays]


def _by_slot(arrays: Arrays, capacity: int) -> list[_Pieces]:
    """Arrays, one after the other, in pieces of which `capacity` elements fill a slot."""
    buckets = plan(tuple(each.size for each in arrays), capacity)
    return [
        [(start, arrays[k][low:high]) for (k, low, high), start in zip(bucket.pieces, bucket.starts, strict=True)]
        for bucket in buckets
    ]


def _at(slots: list[_Pieces], number: int) -> _Pieces:
    """What is in a slot; owners may have too little to be in all."""
    return slots[number] if number < len(slots) else []


class _ScatteredSlot:
    """See `shared.HalfWork`: `chunks` by owner, each `capacity` elements of the slot."""

    def __init__(
        self, chunks: list[_Pieces], targets: _Pieces, capacity: int, region: Region, reduction: Reduction
    ) -> None:
        self.chunks, self.targets, self.capacity = chunks, targets, capacity
        self.region, self.reduction = region, reduction

    def _slots(self, sequence: int) -> list[Any]:
        return self.region.slots(sequence, self.reduction.element.storage)

    def pack(self, sequence: int) -> None:
        region = self.region
        mine = self._slots(sequence)[region.rank]
        for owner, pieces in enumerate(self.chunks):
            if owner != region.rank:
                for start, source in pieces:
                    low = owner * self.capacity + start
                    region.writer.write(source, mine[low : low + source.size])
        region.publish(PACKED, sequence)

    def read(self, sequence: int) -> None:
        rank, slots = self.region.rank, self._slots(sequence)
        for (start, source), (_, target) in zip(self.chunks[rank], self.targets, strict=True):
            low = rank * self.capacity + start
            parts = [each[low : low + source.size] for each in slots]
            parts[rank] = source
            self.reduction.reduce_parts(parts, target)


class _GatheredSlot:
    """See `shared.HalfWork`: bytes; `targets` by owner."""

    def __init__(self, sources: _Pieces, targets: list[_Pieces], region: Region) -> None:
        self.sources, self.targets, self.region = sources, targets, region

    def pack(self, sequence: int) -> None:
        region = self.region
        mine = region.slots(sequence, np.dtype(np.uint8))[region.rank]
        for start, source in self.sources:
            region.writer.write(source, mine[start : start + source.size])
        region.publish(PACKED, sequence)
        for (_, source), (_, target) in zip(self.sources, self.targets[region.rank], strict=False):
            target[...] = source

    def read(self, sequence: int) -> None:
        region = self.region
        slots = region.slots(sequence, np.dtype(np.uint8))
        for owner, pieces in enumerate(self.targets):
            if owner != region.rank:
                for start, target in pieces:
                    region.reader.read(slots[owner][start : start + target.size], target)
