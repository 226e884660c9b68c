"""All-reduce among ranks of one host whose GPUs map each other's slots (gpu/ipc.py). The host copies nothing.

As collectives/shared.py, with one kernel launch per phase: gather all tensors of a slot, sum this rank's chunk directly
from all ranks' slots, scatter the finished chunks from their owners' slots.

    rank 0's GPU    gather 1 | scatter - | sum 0 | gather 2 | scatter 0 | sum 1 | …       one stream
                        PACKED 1 -----.       `--- SUMMED 0 --.
    rank 1's GPU    gather 1 | scatter - | sum 0 | gather 2 | scatter 0 | sum 1 | …

All of a rank's work is in one stream, in the order of `shared.pipelined`, and a stream waits for an event where a rank
waits for a flag there. So the proof that four slots suffice holds for the GPUs too; the hosts only queue work ahead.

Chunks, and the starts of tensors in a slot, are multiples of 16 bytes: kernels read and write 16 bytes at a time. Sums
are made in rank order: same inputs, same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.arrays.cuda import Stream
from ringreduce.collectives.ops import Reduction
from ringreduce.collectives.partition import equal_chunk
from ringreduce.gpu.ipc import Slots
from ringreduce.gpu.kernels import Kernels, Table
from ringreduce.transport.window import PACKED, SUMMED

ALIGNMENT_BYTES = 16  # what a kernel's thread reads and writes at a time


class GpuSlot(NamedTuple):
    """Pieces of tensors that travel together."""

    table: Table  # the pieces' positions in the slot
    inputs: Sequence[int]  # each piece's address
    outputs: Sequence[int]  # each result's address
    length: int  # elements of the slot, gaps included; a multiple of ALIGNMENT_BYTES


def alignment(itemsize: int) -> int:
    """Elements in ALIGNMENT_BYTES."""
    return max(1, ALIGNMENT_BYTES // itemsize)


class MappedSlot:
    """See `shared.SlotWork`; every phase is only queued, on a stream that is the same for all slots of these `peers`.

    slot: at most `peers.slot_bytes` long, alike on all ranks; the stream already waits for the inputs.
    Cost: 3 launches, and 2 waits until the host's other ranks have queued theirs. With P ranks and n bytes a GPU reads
          and writes 4 n + n / P + n bytes, of which it reads 2 n (P - 1) / P from other GPUs.
    """

    def __init__(self, slot: GpuSlot, peers: Slots, reduction: Reduction, kernels: Kernels, stream: Stream) -> None:
        self.slot, self.peers, self.reduction, self.kernels, self.stream = slot, peers, reduction, kernels, stream
        self.itemsize = reduction.element.itemsize
        self.chunk = equal_chunk(slot.length, peers.size, alignment(self.itemsize))

    def pack(self, sequence: int) -> None:
        """See `shared.SlotWork`."""
        peers = self.peers
        self.kernels.gather(self.slot.table, self.slot.inputs, peers.addresses(sequence)[peers.rank], self.stream)
        peers.publish(PACKED, sequence, self.stream)

    def sum(self, sequence: int) -> None:
        """See `shared.SlotWork`."""
        peers = self.peers
        peers.follow(PACKED, sequence, self.stream)
        low = min(self.slot.length, peers.rank * self.chunk)
        count = min(self.slot.length, low + self.chunk) - low
        if count:
            chunks = [each + low * self.itemsize for each in peers.addresses(sequence)]
            self.kernels.reduce(self.reduction, chunks, chunks[peers.rank], count, self.stream)
        peers.publish(SUMMED, sequence, self.stream)

    def copy_out(self, sequence: int) -> None:
        """See `shared.SlotWork`."""
        slot, peers = self.slot, self.peers
        peers.follow(SUMMED, sequence, self.stream)
        self.kernels.scatter(slot.table, peers.addresses(sequence), self.chunk, slot.outputs, self.stream)
