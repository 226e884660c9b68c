"""The all-reduce of GPU arrays: a batch's slots, and what is queued for them, by the way that the ranks have found.

Nothing here waits for the GPU, but before the host reads what was copied down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringreduce import fusion
from ringreduce.buffers import Buffer, GpuBuffer
from ringreduce.collectives import bridged, hierarchical, mapped, shared
from ringreduce.collectives.hierarchical import WIDTH
from ringreduce.collectives.mapped import GpuSlot
from ringreduce.collectives.overlap import overlapped
from ringreduce.cuda.kernels import Kernels
from ringreduce.cuda.runtime import Stream
from ringreduce.dtypes import TABLE, ElementType
from ringreduce.engine.batch import PHASES, Batch, view
from ringreduce.engine.context import Context
from ringreduce.engine.messages import MessageCollective
from ringreduce.log import LOGGER
from ringreduce.ops import Reduction
from ringreduce.transport import nccl
from ringreduce.transport.base import Steps
from ringreduce.transport.device import Done, Stage
from ringreduce.transport.subset import CHANNELS

BRIDGED_SLOT_BYTES = 4 << 20
"""Of a slot at most, between hosts: the wire is slow, and shorter slots overlap better."""
WINDOW_SLOT_BYTES = 8 << 20
"""Copied through the host at a time, where the host's ranks share memory."""


class GpuBatch:
    """Tensors of one element type on this rank's GPU, in slots of at most `slot_bytes`."""

    def __init__(self, batch: Batch, slot_bytes: int, context: Context) -> None:
        self.batch, self.context, self.gpu = batch, context, context.gpu
        self.element: ElementType = batch.inputs[0].element
        self.itemsize = self.element.itemsize
        multiple = mapped.alignment(self.itemsize)
        capacity = max(1, slot_bytes // self.itemsize // multiple) * multiple
        self.slots = fusion.plan(batch.counts, capacity, alignment=multiple)
        self.capacity = capacity
        batch.expect(self.slots)

    def gpu_slot(self, slot: fusion.Slot, stream: Stream) -> GpuSlot:
        """A slot as kernels on a stream know it."""
        counts = [piece.high - piece.low for piece in slot.pieces]
        table = self.gpu.kernels.table(slot.starts, counts, self.itemsize, stream)
        inputs = [address(self.batch.inputs[number], low) for number, low, _ in slot.pieces]
        outputs = [address(self.batch.outputs[number], low) for number, low, _ in slot.pieces]
        return GpuSlot(table, inputs, outputs, slot.length)

    def watch(self, number: int, phase: int) -> None:
        """Tell the timeline when a phase of a slot is queued."""
        if self.context.timeline.recording:
            self.context.timeline.turn(self.batch.names(self.slots[number]), PHASES.get(phase))

    def watching(self, streams: Sequence[Stream]) -> shared.Watch:
        """What a collective tells of its slots, each on its stream, goes to the timeline; at the end it is settled."""

        def watch(number: int, phase: int) -> None:
            if phase == shared.DONE:
                self.settle(number, streams[number])
            else:
                self.watch(number, phase)

        return watch

    def settle(self, number: int, stream: Stream) -> None:
        """A slot's results are queued on a stream: the engine's waits for them, and its owners may be complete."""
        self.watch(number, shared.DONE)
        if stream is not self.gpu.stream:
            self.gpu.stream.wait(stream.record())
        self.batch.settle(self.slots[number], self.context)

    def through_host(self, collective: Callable[[Any, int], Steps[None]]) -> Steps[None]:
        """Copy each slot down, let a collective, given its elements and a channel, work on it in place, copy it up.

        Several slots are under way, each with a stream, pinned memory and a channel of its own.
        """
        start = self.gpu.stream.record()

        def steps(number: int, channel: int) -> Steps[None]:
            stage = self.context.routes.gpu.stages[channel]
            stage.stream.wait(start)
            slot = self.down(number, stage)
            yield Done(stage.stream.record(), self.context.transport.rank)
            self.watch(number, shared.REDUCE)
            yield from collective(self.on_host(slot, stage), channel)
            self.up(number, slot, stage)

        yield from overlapped((steps(number, number % CHANNELS) for number in range(len(self.slots))), CHANNELS)

    def down(self, number: int, stage: Stage) -> GpuSlot:
        """Queue what gathers a slot and copies it to the host."""
        self.watch(number, shared.PACK)
        slot = self.gpu_slot(self.slots[number], stage.stream)
        block, pinned = stage.block(self.capacity * self.itemsize), stage.pinned(self.capacity * self.itemsize)
        self.gpu.kernels.gather(slot.table, slot.inputs, block.pointer, stage.stream)
        stage.stream.copy(pinned.pointer, block.pointer, slot.length * self.itemsize)
        return slot

    def on_host(self, slot: GpuSlot, stage: Stage) -> Any:
        """The elements that were copied down."""
        nbytes = slot.length * self.itemsize
        return stage.pinned(nbytes).elements(self.element.storage, 0, nbytes)

    def up(self, number: int, slot: GpuSlot, stage: Stage) -> None:
        """Queue what copies a slot back and scatters it."""
        self.watch(number, shared.COPY)
        nbytes = slot.length * self.itemsize
        block = stage.block(nbytes)
        stage.stream.copy(block.pointer, stage.pinned(nbytes).pointer, nbytes)
        self.gpu.kernels.scatter(slot.table, [block.pointer], slot.length, slot.outputs, stage.stream)
        self.settle(number, stage.stream)


def address(buffer: Buffer, low: int = 0) -> int:
    """That of element `low` of GPU memory."""
    if not isinstance(buffer, GpuBuffer):
        raise TypeError(f"host memory among GPU arrays: {buffer.device}")
    return buffer.pointer + low * buffer.element.itemsize


class _WithKernels(Reduction):
    """Reduces elements of several ranks with our kernels: CuPy's own flush subnormal numbers to zero."""

    kernels: Kernels
    stream: Stream

    def __new__(cls, reduction: Reduction, kernels: Kernels, stream: Stream) -> _WithKernels:
        made = super().__new__(cls, *reduction)
        made.kernels, made.stream = kernels, stream
        return made

    def reduce_parts(self, parts: Sequence[Any], out: Any) -> None:
        """See `Reduction.reduce_parts`; GPU memory."""
        self.kernels.reduce(self, [each.data.ptr for each in parts], out.data.ptr, out.size, self.stream)


class GpuReduction:
    """The all-reduce of one batch; made when it is planned, so that its owners know what they wait for."""

    def __init__(self, batch: Batch, reduction: Reduction, context: Context) -> None:
        self.reduction, self.context = reduction, context
        self.gpu, self.routes = context.gpu, context.routes.gpu
        self.sum_itemsize = reduction.sum_type.itemsize
        self.way = self._way()
        self.algorithm = ""
        """For `staged`: that of the host."""
        if self.way == "staged":
            self.algorithm = context.routes.choice(batch.nbytes, reduction)
        self.work = GpuBatch(batch, self._slot_bytes(), context)
        if context.debugs:
            what = f"allreduce of {len(batch.inputs)} GPU tensors, {batch.nbytes} B of {reduction.element.name}"
            LOGGER.debug(f"{what}: {self.way} {self.algorithm}".rstrip() + f", in {len(self.work.slots)} slots")

    def run(self) -> Steps[None]:
        """Queue it all."""
        ways: dict[str, Callable[[], Steps[None]]] = {
            "alone": self.alone,
            "mapped": self.mapped,
            "bridged": self.bridged,
            "device": self.device,
            "staged": self.staged,
            "nccl": self.nccl,
        }
        yield from ways[self.way]()

    def _way(self) -> str:
        if self.routes.nccl is not None and nccl.supported(self._nccl_element(), self.reduction.op):
            return "nccl"
        return self.routes.way

    def _slot_bytes(self) -> int:
        settings = self.context.settings
        if self.way == "bridged":
            return min(settings.cuda_slot_bytes, BRIDGED_SLOT_BYTES)
        if self.way == "staged" and self.algorithm in ("shared", "hierarchical"):
            return WINDOW_SLOT_BYTES
        if self.way == "staged":
            # the fusion buffer's blocks hold the sums; for a ring the finished elements behind them
            return settings.fusion_slot_bytes * self.reduction.element.itemsize // self.sum_itemsize
        if self.way == "mapped":
            return settings.cuda_slot_bytes
        return settings.cuda_slot_bytes * self.reduction.element.itemsize // self.sum_itemsize

    # The ways

    def alone(self) -> Steps[None]:
        """Scale what is to be scaled."""
        work, stream, kernels = self.work, self.gpu.stream, self.gpu.kernels
        block = self._block(work.capacity * self.sum_itemsize)
        for number, each in enumerate(work.slots):
            slot = work.gpu_slot(each, stream)
            kernels.load(slot.table, slot.inputs, block, self.reduction, stream, wide=True)
            kernels.store(slot.table, block, slot.outputs, self.reduction, stream, wide=True)
            work.settle(number, stream)
        yield from ()

    def mapped(self) -> Steps[None]:
        """See collectives/mapped.py."""
        work, stream, routes = self.work, self.gpu.stream, self.routes
        slots = [work.gpu_slot(each, stream) for each in work.slots]
        watch = work.watching([stream] * len(slots))
        peers, scratch = routes.mapping()
        yield from mapped.allreduce(slots, peers, self.reduction, self.gpu.kernels, stream, scratch, watch)

    def bridged(self) -> Steps[None]:
        """See collectives/bridged.py."""
        work, bridge = self.work, self.routes.bridge
        if bridge is None:
            raise AssertionError("the way is bridged, but there is no bridge")
        first = bridge.peers.flags.turn
        streams = [bridge.stages[(first + number) % WIDTH].stream for number in range(len(work.slots))]
        slots = [work.gpu_slot(each, stream) for each, stream in zip(work.slots, streams, strict=True)]
        watch = work.watching(streams)
        start, segment_bytes = self.gpu.stream.record(), self.context.routes.segment_bytes
        yield from bridged.allreduce(slots, bridge, self.reduction, self.gpu.kernels, start, segment_bytes, watch)

    def nccl(self) -> Steps[None]:
        """NCCL sums; the kernels before and after it scale and divide. Slots follow each other in one block."""
        work, stream, kernels, communicator = self.work, self.gpu.stream, self.gpu.kernels, self.routes.nccl
        if communicator is None:
            raise AssertionError("the way is nccl, but there is no communicator")
        element, wide = self._nccl_element(), self._nccl_is_wide()
        block = self._block(work.capacity * element.itemsize)
        for number, each in enumerate(work.slots):
            slot = work.gpu_slot(each, stream)
            work.watch(number, shared.PACK)
            kernels.load(slot.table, slot.inputs, block, self.reduction, stream, wide=wide)
            work.watch(number, shared.REDUCE)
            communicator.allreduce(block, slot.length, element, self.reduction.op, stream)
            work.watch(number, shared.COPY)
            kernels.store(slot.table, block, slot.outputs, self.reduction, stream, wide=wide)
            work.settle(number, stream)
        yield from ()

    def _nccl_is_wide(self) -> bool:
        """Integers are averaged in int64; 16-bit floats stay what they are, for those who ask for NCCL."""
        return not self.reduction.in_place and not self.reduction.element.is_half

    def _nccl_element(self) -> ElementType:
        return TABLE[self.reduction.sum_type.name] if self._nccl_is_wide() else self.reduction.element

    def device(self) -> Steps[None]:
        """Messages of GPU memory, summed by the GPU; all on the engine's stream, for which outgoing messages wait."""
        yield from overlapped(self._device_slots(), CHANNELS)

    def _device_slots(self) -> Iterator[Steps[None]]:
        for number in range(len(self.work.slots)):
            yield self._device_slot(number, number % CHANNELS)

    def _device_slot(self, number: int, channel: int) -> Steps[None]:
        work, stream, kernels, reduction = self.work, self.gpu.stream, self.gpu.kernels, self.reduction
        slot = work.gpu_slot(work.slots[number], stream)
        finished_bytes, sum_bytes = slot.length * work.itemsize, slot.length * self.sum_itemsize
        block = self.routes.blocks[channel].block(work.capacity * (self.sum_itemsize + work.itemsize))
        algorithm = "direct" if self.context.settings.deterministic else "ring"
        summing = _WithKernels(reduction, kernels, stream)
        collective = MessageCollective(algorithm, work.batch.inputs[0], summing, channel, self.context)
        work.watch(number, shared.PACK)
        if algorithm == "direct":
            kernels.gather(slot.table, slot.inputs, block.pointer, stream)
            finished, offset = block.elements(reduction.element.storage, 0, finished_bytes), 0
            work.watch(number, shared.REDUCE)
            yield from collective.run(finished, None)
        else:
            kernels.load(slot.table, slot.inputs, block.pointer, reduction, stream, wide=True)
            partial = block.elements(reduction.sum_type, 0, sum_bytes)
            offset = 0 if reduction.in_place else sum_bytes
            finished = block.elements(reduction.element.storage, offset, offset + finished_bytes)
            work.watch(number, shared.REDUCE)
            yield from collective.ring(finished, partial, bridged.GPU_SEGMENT_BYTES)
        work.watch(number, shared.COPY)
        kernels.scatter(slot.table, [block.pointer + offset], slot.length, slot.outputs, stream)
        work.settle(number, stream)

    def staged(self) -> Steps[None]:
        """Down, what the host does with its own arrays, and up."""
        if self.algorithm in ("shared", "hierarchical"):
            yield from self._through_window()
        else:
            yield from self.work.through_host(self._by_messages)

    def _by_messages(self, flat: Any, channel: int) -> Steps[None]:
        like = Buffer(flat, self.reduction.element, flat.shape, "cpu", flat.dtype)
        collective = MessageCollective(self.algorithm, like, self.reduction, channel, self.context)
        if self.algorithm != "ring" or self.reduction.in_place:
            yield from collective.run(flat, None)
            return
        with self.context.memory.block(like) as block:
            partial = view(block, self.reduction.sum_type)[: flat.size]
            partial[...] = self.reduction.widen(flat)
            yield from collective.run(flat, partial)

    def _through_window(self) -> Steps[None]:
        """The host's shared memory takes slot after slot, while the next is copied down and the last one up."""
        work, stages = self.work, self.routes.stages
        start, rank = self.gpu.stream.record(), self.context.transport.rank
        copied: list[tuple[GpuSlot, Done]] = []
        for number in range(len(work.slots) + 1):
            if number < len(work.slots):
                stage = stages[number % 2]
                stage.stream.wait(start)
                slot = work.down(number, stage)
                copied.append((slot, Done(stage.stream.record(), rank)))
            if number > 0:
                slot, done = copied[number - 1]
                yield done
                stage = stages[(number - 1) % 2]
                work.watch(number - 1, shared.REDUCE)
                yield from self._in_window(work.on_host(slot, stage))
                work.up(number - 1, slot, stage)

    def _in_window(self, flat: Any) -> Steps[None]:
        routes = self.context.routes
        region = routes.region
        if region is None:
            raise AssertionError("the algorithm is one of shared memory, but there is none")
        step = region.slot_bytes // flat.itemsize
        pieces = [flat[low : low + step] for low in range(0, flat.size, step)]
        parts = [[shared.Part(piece, piece)] for piece in pieces]
        if self.algorithm == "shared":
            yield from shared.allreduce(parts, region, self.reduction)
        elif routes.hierarchy is not None:
            yield from hierarchical.allreduce(parts, region, routes.hierarchy, self.reduction, routes.segment_bytes)

    def _block(self, nbytes: int) -> int:
        """The address of GPU memory for work on the engine's stream."""
        return self.routes.blocks[0].block(nbytes).pointer
