"""All-reduce of GPU arrays over hosts with several ranks each: mapped slots inside a host, rings across.

What collectives/hierarchical.py does, with the kernels of collectives/mapped.py:

    gather · sum the host's part of this rank's chunk · copy it down · ring with the ranks of the other hosts · copy the
    finished chunk up into this rank's slot · scatter all chunks out of their owners' slots

Where MPI takes GPU memory nothing is copied down and up: the rings' messages, and their sums, are the GPU's.

Slots overlap: one is on the wire while the next is gathered, summed and copied. Each of the `WIDTH` slots under way has
a stream of its own, so the proof in hierarchical.py that `2 WIDTH` slots of memory suffice holds for the GPUs too: what
a slot's turn does comes in its stream behind what the turn `WIDTH` before has done.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce import buffers
from ringreduce.collectives import ring
from ringreduce.collectives.hierarchical import WIDTH, Hierarchy, InOrder
from ringreduce.collectives.mapped import GpuSlot, alignment
from ringreduce.collectives.overlap import overlapped
from ringreduce.collectives.shared import COPY, DONE, PACK, REDUCE, Watch
from ringreduce.cuda.kernels import Kernels
from ringreduce.cuda.runtime import Block, Event, Pinned, Stream
from ringreduce.ops import Reduction
from ringreduce.partition import equal_chunk
from ringreduce.transport.base import Steps, Transport
from ringreduce.transport.device import Done, Stage
from ringreduce.transport.peers import PeerSlots
from ringreduce.transport.window import PACKED, SUMMED

GPU_SEGMENT_BYTES = 1 << 20
"""Of messages of GPU memory: each costs some launches and a wait for the GPU, so they are longer than the host's."""


class Bridge:
    """One process set's, on one of its ranks: `hierarchy` tells who is whose neighbour across the hosts."""

    def __init__(self, hierarchy: Hierarchy, peers: PeerSlots, current: Stream | None = None) -> None:
        """current: CuPy's current stream in this thread, where messages are of GPU memory; None: they are not."""
        self.hierarchy, self.peers, self.current = hierarchy, peers, current
        self.stages = [Stage(Stream(peers.own.device)) for _ in range(WIDTH)]

    def free(self) -> None:
        """Give the memory back."""
        for stage in self.stages:
            stage.free()


def allreduce(
    slots: Sequence[GpuSlot],
    bridge: Bridge,
    reduction: Reduction,
    kernels: Kernels,
    start: Event,
    segment_bytes: int = ring.SEGMENT_BYTES,
    watch: Watch = lambda number, phase: None,
) -> Steps[None]:
    """Reduce the pieces of all slots over all ranks of all hosts; every rank gets the same bits.

    slots: each at most `peers.slot_bytes` long, alike on all ranks;  start: behind it the inputs may be read.
    watch: called with a slot's number and phase; DONE: its stage's stream, `bridge.stages[turn % WIDTH]`, has the rest.
    Cost:  as hierarchical.allreduce over the wire; over each GPU's bus n / P bytes of sums down and up.
    """
    flags, hierarchy = bridge.peers.flags, bridge.hierarchy
    first = flags.turn
    flags.turn += len(slots)
    hierarchy.summed = first
    yield from overlapped(
        (
            _slot(slot, first + number, number, bridge, reduction, kernels, start, segment_bytes, watch)
            for number, slot in enumerate(slots)
        ),
        WIDTH,
    )


def _slot(
    slot: GpuSlot,
    turn: int,
    number: int,
    bridge: Bridge,
    reduction: Reduction,
    kernels: Kernels,
    start: Event,
    segment_bytes: int,
    watch: Watch,
) -> Steps[None]:
    peers, hierarchy = bridge.peers, bridge.hierarchy
    stage = bridge.stages[turn % WIDTH]
    stream, itemsize = stage.stream, reduction.element.itemsize
    slots = peers.slots(turn)
    chunk = equal_chunk(slot.length, hierarchy.chunks, alignment(itemsize))
    watch(number, PACK)
    stream.wait(start)
    kernels.gather(slot.table, slot.inputs, slots[peers.rank], stream)
    peers.publish(PACKED, turn, stream)
    watch(number, REDUCE)
    yield peers.flags.arrival(PACKED, turn)
    peers.follow(PACKED, turn, stream)
    low = min(slot.length, peers.rank * chunk)
    count = min(slot.length, low + chunk) - low
    if count and hierarchy.rings:
        chunks = [each + low * itemsize for each in slots]
        transport = hierarchy.rings[number % WIDTH]
        yield from _across(chunks, count, transport, stage, bridge, reduction, kernels, segment_bytes)
    if hierarchy.summed != turn:
        yield InOrder(hierarchy, turn)
    peers.publish(SUMMED, turn, stream)
    hierarchy.summed = turn + 1
    yield peers.flags.arrival(SUMMED, turn)
    peers.follow(SUMMED, turn, stream)
    watch(number, COPY)
    kernels.scatter(slot.table, slots, chunk, slot.outputs, stream)
    watch(number, DONE)


def _across(
    chunks: Sequence[int],
    count: int,
    transport: Transport,
    stage: Stage,
    bridge: Bridge,
    reduction: Reduction,
    kernels: Kernels,
    segment_bytes: int,
) -> Steps[None]:
    """Sum the chunk of the host's ranks, reduce it over the hosts, and leave it in this rank's slot.

    Messages of GPU memory, and what CuPy does with them, know its current stream only.
    """
    stream, current = stage.stream, bridge.current
    sum_bytes, finished_bytes = count * reduction.sum_type.itemsize, count * reduction.element.itemsize
    block = stage.block(sum_bytes + finished_bytes)
    memory: Block | Pinned = block
    kernels.partial(reduction, chunks, block.pointer, count, stream)
    if current is None:
        memory = stage.pinned(sum_bytes + finished_bytes)
        stream.copy(memory.pointer, block.pointer, sum_bytes)
    else:
        segment_bytes = GPU_SEGMENT_BYTES
    yield Done(stream.record(), transport.rank)
    partial = memory.elements(reduction.sum_type, 0, sum_bytes)
    offset = 0 if reduction.in_place else sum_bytes
    finished = memory.elements(reduction.element.storage, offset, offset + finished_bytes)
    length = min(max(1, segment_bytes // partial.itemsize), partial.size)
    scratch = buffers.empty_like(partial, ring.RECEIVES_AHEAD * length, partial.dtype)
    yield from ring.allreduce(finished, transport, reduction, segment_bytes, ring.Workspace(partial, scratch))
    if current is not None:
        stream.wait(current.record())
    stream.copy(chunks[bridge.peers.rank], memory.pointer + offset, finished_bytes)
