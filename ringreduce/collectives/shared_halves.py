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

from ringreduce.collectives.fusion import plan
from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.shared import OnPhase, Slot, Span, with_one_wait
from ringreduce.transport.base import Steps
from ringreduce.transport.window import Region

Arrays = Sequence[Any]  # 1-D, contiguous, in host memory


def reduce_scatter(
    chunks: Sequence[Arrays],
    targets: Arrays,
    region: Region,
    reduction: Reduction,
    watch: OnPhase = lambda number, phase: None,
) -> Steps[None]:
    """Reduce chunks[r] of all ranks into rank r's targets, in rank order: the bits are those of `shared.allreduce`.

    Shape:  `reduction.element.storage`; chunks have the same lengths on all ranks; targets those of this rank's chunks.
    watch:  as in `shared.allreduce`.
    Cost:   one wait a slot; of n elements a rank packs n (P - 1) / P and sums n / P of every rank's.
    """
    dtype = reduction.element.storage
    capacity = region.slot_bytes // dtype.itemsize // region.size
    packed = [_by_slot(r, each, capacity, r * capacity) for r, each in enumerate(chunks)]
    results = _by_slot(region.rank, targets, capacity, region.rank * capacity)
    own, packed[region.rank] = packed[region.rank], []
    slots = []
    for number in range(max(len(own), *map(len, packed))):
        both = zip(_at([own], number), _at([results], number), strict=True)
        summed = [Span(*chunk[:4], result.target) for chunk, result in both]
        slots.append(Slot(region, dtype, _at(packed, number), summed, (), reduction, spreads=False))
    yield from with_one_wait(slots, region, watch)


def allgather(
    sources: Arrays, targets: Sequence[Arrays], region: Region, watch: OnPhase = lambda number, phase: None
) -> Steps[None]:
    """Copy every rank r's sources into targets[r] of all ranks.

    Shape:  any types; targets[r] as rank r's sources, or empty on rank r itself, which then copies nothing.
    watch:  as in `shared.allreduce`.
    Cost:   one wait a slot; a rank packs its own elements, and copies all others once.
    """
    own = [_by_slot(region.rank, _bytes(sources), region.slot_bytes)]
    by_owner = [_by_slot(r, _bytes(each), region.slot_bytes) for r, each in enumerate(targets)]
    slots = [
        Slot(region, np.dtype(np.uint8), _at(own, number), copied=_at(by_owner, number))
        for number in range(max(map(len, own + by_owner)))
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


def _by_slot(owner: int, arrays: Arrays, capacity: int, first: int = 0) -> list[list[Span]]:
    """Arrays, one after the other, in pieces of which `capacity` elements, from `first` on, fill a slot."""
    return [
        [
            Span(owner, first + start, first + start + high - low, arrays[k][low:high], arrays[k][low:high])
            for (k, low, high), start in zip(bucket.pieces, bucket.starts, strict=True)
        ]
        for bucket in plan(tuple(each.size for each in arrays), capacity)
    ]


def _at(slots_of_owners: Sequence[list[list[Span]]], number: int) -> list[Span]:
    """What is in a slot; owners may have too little to be in all."""
    return [each for slots in slots_of_owners if number < len(slots) for each in slots[number]]
