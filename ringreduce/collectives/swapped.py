"""What moves between mapped slots without all-reduce's second half: broadcast, allgather, alltoall, reducescatter.

    every rank      put 0 | put 1 | take 0 | put 2 | take 1 | …        one stream a rank

A turn has two halves. A rank puts into its own slot what others need of it; when all have, it takes what it needs
straight out of all slots: copies it, or sums it. All but the sums are copies of bytes.

One slot is put ahead of the one that is taken. Before a rank puts slot k + 4, whose memory is that of slot k, it has
taken slot k + 2, for which it waited until all had put k + 2, after each had taken k. The turns of mapped.py go on
where these end, and the other way round, for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringreduce.collectives.mapped import ALIGNMENT_BYTES, GpuSlot
from ringreduce.cuda.kernels import Kernels
from ringreduce.cuda.runtime import Stream
from ringreduce.ops import Reduction
from ringreduce.transport.base import Steps
from ringreduce.transport.peers import PeerSlots
from ringreduce.transport.window import PACKED

MOST_BYTES = 1 << 30
"""Of all ranks' parts of a turn together: kernels count a slot's bytes in 32 bits."""


class Turn(NamedTuple):
    """What is queued in the two halves of a turn, given the address of the own slot, and of all."""

    put: Callable[[int], None]
    take: Callable[[Sequence[int]], None]


class Gpu(NamedTuple):
    """What all of these need."""

    peers: PeerSlots
    kernels: Kernels
    stream: Stream
    """The same in every call with these `peers`, those of mapped.py too."""


def swap(turns: Sequence[Turn], peers: PeerSlots, stream: Stream) -> Steps[None]:
    """Queue all turns; all ranks have equally many. Cost: a wait a turn for the other ranks to have queued theirs."""
    flags = peers.flags
    first = flags.turn
    flags.turn += len(turns)
    for number in range(-1, len(turns)):
        if number + 1 < len(turns):
            turn = first + number + 1
            turns[number + 1].put(peers.slots(turn)[peers.rank])
            peers.publish(PACKED, turn, stream)
        if number >= 0:
            turn = first + number
            if not flags.arrived(PACKED, turn):
                yield flags.arrival(PACKED, turn)
            peers.follow(PACKED, turn, stream)
            turns[number].take(peers.slots(turn))


def broadcast(slots: Sequence[GpuSlot], root: int, gpu: Gpu, taken: Callable[[int], None]) -> Steps[None]:
    """Copy the pieces of `root` into those of all; `taken` is called with the number of each slot that is queued."""
    kernels, stream = gpu.kernels, gpu.stream
    is_root = gpu.peers.rank == root

    def turn(number: int, slot: GpuSlot) -> Turn:
        def put(own: int) -> None:
            if is_root:
                kernels.gather(slot.table, slot.inputs, own, stream)

        def take(all_slots: Sequence[int]) -> None:
            if not is_root or slot.inputs != slot.outputs:
                kernels.scatter(slot.table, [all_slots[root]], slot.length, slot.outputs, stream)
            taken(number)

        return Turn(put, take)

    yield from swap([turn(number, slot) for number, slot in enumerate(slots)], gpu.peers, stream)


def allgather(source: int, target: int, counts: Sequence[int], gpu: Gpu) -> Steps[None]:
    """Copy every rank's bytes at `source` to `target`, one rank's after the other's; counts: bytes of each rank."""
    size, rank = gpu.peers.size, gpu.peers.rank
    step = _step(gpu, size)
    ends = _sums(counts)

    def turn(low: int) -> Turn:
        def put(own: int) -> None:
            _gather(gpu, [0], [_part(counts[rank], low, step)], [source + low], own)

        def take(all_slots: Sequence[int]) -> None:
            parts = [_part(count, low, step) for count in counts]
            _scatter(
                gpu,
                step,
                parts,
                [target + end - count + low for end, count in zip(ends, counts, strict=True)],
                all_slots,
            )

        return Turn(put, take)

    yield from swap([turn(low) for low in range(0, max(counts), step)], gpu.peers, gpu.stream)


def alltoall(
    source: int, target: int, sent: Sequence[int], received: Sequence[int], longest: int, gpu: Gpu
) -> Steps[None]:
    """Copy part k of each rank's bytes at `source` to rank k's `target`, one rank's after the other's.

    sent, received: bytes of each part;  longest: of any part on any rank.
    """
    size, rank = gpu.peers.size, gpu.peers.rank
    step = _step(gpu, size) // size // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    sent_ends, received_ends = _sums(sent), _sums(received)

    def turn(low: int) -> Turn:
        def put(own: int) -> None:
            parts = [_part(count, low, step) for count in sent]
            starts = [each * step for each in range(size)]
            _gather(gpu, starts, parts, [source + end - n + low for end, n in zip(sent_ends, sent, strict=True)], own)

        def take(all_slots: Sequence[int]) -> None:
            parts = [_part(count, low, step) for count in received]
            targets = [target + end - n + low for end, n in zip(received_ends, received, strict=True)]
            _scatter(gpu, step, parts, targets, [slot + rank * step for slot in all_slots])

        return Turn(put, take)

    yield from swap([turn(low) for low in range(0, longest, step)], gpu.peers, gpu.stream)


def reducescatter(source: int, target: int, counts: Sequence[int], reduction: Reduction, gpu: Gpu) -> Steps[None]:
    """Reduce part k of all ranks' elements at `source` to rank k's `target`; counts: elements of each part.

    In the order of `ring.scatter_reduce`, which ends at its owner: the bits of the host's.
    """
    size, rank, itemsize = gpu.peers.size, gpu.peers.rank, reduction.element.itemsize
    step = _step(gpu, size) // size // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    lengths = [count * itemsize for count in counts]
    ends = _sums(lengths)

    def turn(low: int) -> Turn:
        def put(own: int) -> None:
            parts = [_part(nbytes, low, step) for nbytes in lengths]
            starts = [each * step for each in range(size)]
            _gather(gpu, starts, parts, [source + end - n + low for end, n in zip(ends, lengths, strict=True)], own)

        def take(all_slots: Sequence[int]) -> None:
            mine = _part(lengths[rank], low, step) // itemsize
            if mine:
                in_ring_order = (*all_slots[rank + 1 :], *all_slots[: rank + 1])
                parts = [slot + rank * step for slot in in_ring_order]
                gpu.kernels.reduce(reduction, parts, target + low, mine, gpu.stream)

        return Turn(put, take)

    yield from swap([turn(low) for low in range(0, max(lengths), step)], gpu.peers, gpu.stream)


def _step(gpu: Gpu, size: int) -> int:
    """Bytes of a slot that a turn uses."""
    return min(gpu.peers.slot_bytes, MOST_BYTES // size // ALIGNMENT_BYTES * ALIGNMENT_BYTES)


def _part(nbytes: int, low: int, step: int) -> int:
    """How many of a part's bytes travel in the turn that begins with byte `low`."""
    return max(0, min(step, nbytes - low))


def _sums(counts: Sequence[int]) -> list[int]:
    total, sums = 0, []
    for count in counts:
        total += count
        sums.append(total)
    return sums


def _gather(gpu: Gpu, starts: Sequence[int], counts: Sequence[int], sources: Sequence[int], slot: int) -> None:
    some = [(start, n, source) for start, n, source in zip(starts, counts, sources, strict=True) if n]
    if some:
        begun, lengths, addresses = zip(*some, strict=True)
        table = gpu.kernels.table(begun, lengths, 1, gpu.stream)
        gpu.kernels.gather(table, addresses, slot, gpu.stream)


def _scatter(gpu: Gpu, step: int, counts: Sequence[int], targets: Sequence[int], slots: Sequence[int]) -> None:
    """Copy the first bytes of slot k to target k, as many as counts tells."""
    some = [(each * step, n, target) for each, (n, target) in enumerate(zip(counts, targets, strict=True)) if n]
    if some:
        starts, lengths, addresses = zip(*some, strict=True)
        table = gpu.kernels.table(starts, lengths, 1, gpu.stream)
        shifted = [
            slot - each * step for each, slot in enumerate(slots)
        ]  # byte b of a table is byte b - k step of slot k
        gpu.kernels.scatter(table, shifted, step, addresses, gpu.stream)
