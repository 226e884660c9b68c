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

An allgather or a broadcast that would fill more than one slot goes through none where the kernel lets the ranks read
each other's memory (transport/peer_memory.py): one copy in place of two, as MPI does it. Milliseconds by slots, so, and
of MPI, on an Intel Xeon: two ranks, allgather of 8 MiB 2.9, 2.1, 1.6, of 64 MiB 30, 24, 23; broadcast of 8 MiB 1.5,
1.2, 0.9, of 64 MiB 8.7, 12, 11; four ranks on two cores, allgather of 64 MiB 125, 91, 108, broadcast 29, 23, 31.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.collectives.fusion import plan
from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.shared import COPY, DONE, PACK, REDUCE, OnPhase, Slot, Span, with_one_wait
from ringreduce.transport import peer_memory
from ringreduce.transport.base import Steps
from ringreduce.transport.window import PACKED, SUMMED, Region

Arrays = Sequence[Any]  # 1-D, contiguous, in host memory
_HEAD = 3  # words of a slot before its rank's places: whether it could, its process, how many places


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
    Cost:   one wait a slot, and a rank packs its own elements, and copies all others once; or two waits and one copy.
    """
    by_rank = [*targets[: region.rank], sources, *targets[region.rank + 1 :]]
    if region.reads_peers and max([sum([part.nbytes for part in each]) for each in by_rank]) > region.slot_bytes:
        region.reads_peers = yield from _read_from_all(sources, targets, region, watch)
        if region.reads_peers:
            return
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


def _read_from_all(sources: Arrays, targets: Sequence[Arrays], region: Region, watch: OnPhase) -> Steps[bool]:
    """Copy every rank r's sources into targets[r] straight from r's process; False where a rank cannot.

    A slot holds where its rank's sources are, and whether that rank could do its part: so all know when one could not.
    Cost: two waits, and one copy of each element.
    """
    sequence = region.sequence
    region.sequence = sequence + 1
    watch(0, PACK)
    slots, places = region.slots(sequence, np.dtype(np.int64)), peer_memory.places(sources)
    mine = slots[region.rank]
    has_room = _HEAD + places.size <= len(mine)
    told = places.reshape(-1) if has_room else ()
    mine[:_HEAD] = has_room, os.getpid(), len(told) // 2
    mine[_HEAD : _HEAD + len(told)] = told
    region.publish(PACKED, sequence)
    watch(0, REDUCE)
    if not region.arrived(PACKED, sequence):
        yield region.arrival(PACKED, sequence)
    watch(0, COPY)
    for owner, (slot, into) in enumerate(zip(slots, targets, strict=True)):
        _, process, count = slot[:_HEAD].tolist()
        theirs, own = slot[_HEAD : _HEAD + 2 * count].reshape(count, 2), peer_memory.places(into)
        if mine[0] and (owner != region.rank or len(own)):
            mine[0] = len(own) == count and peer_memory.read(process, theirs, own)
    region.publish(SUMMED, sequence)
    if not region.arrived(SUMMED, sequence):
        yield region.arrival(SUMMED, sequence)
    watch(0, DONE)
    return all(each[0] for each in slots)


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
