"""The all-reduce of GPU arrays: a batch's slots, and the work queued for them on the path that the ranks have chosen.

Nothing here waits for the GPU, except before the host reads what was copied down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.cuda import Stream
from ringreduce.arrays.dtypes import TABLE, ElementType
from ringreduce.arrays.gpu_buffer import GpuBuffer
from ringreduce.collectives import fusion, ring, shared
from ringreduce.collectives.cost_model import BUCKETS_IN_FLIGHT
from ringreduce.collectives.ops import Average, Reduction, Sum
from ringreduce.collectives.overlap import InOrder, Order, overlapped
from ringreduce.execution import point_to_point
from ringreduce.execution.batch import Batch
from ringreduce.execution.packing import view, watcher
from ringreduce.gpu import nccl
from ringreduce.gpu.ipc import PublishedWhenDone
from ringreduce.gpu.ipc_allreduce import GpuSlot, MappedSlot, alignment
from ringreduce.gpu.paths import GpuPaths
from ringreduce.gpu.stage import Done, Stage
from ringreduce.kernels import quantized
from ringreduce.settings import Settings
from ringreduce.settings.log import LOGGER
from ringreduce.transport.base import Steps

GPU_SEGMENT_BYTES = 1 << 20  # longer than the host's, since each costs some launches and a wait for the GPU
WINDOW_SLOT_BYTES = 8 << 20  # for host_staged, where the host's ranks share memory


class GpuBatch:
    """Tensors of one element type on this rank's GPU, in slots of at most `slot_bytes`."""

    def __init__(self, batch: Batch, slot_bytes: int, paths: GpuPaths) -> None:
        self.batch, self.paths, self.context, self.gpu = batch, paths, paths.context, paths.gpu
        self.element: ElementType = batch.inputs[0].element
        self.itemsize = self.element.itemsize
        multiple = self.multiple
        self.capacity = max(1, slot_bytes // self.itemsize // multiple) * multiple
        self.buckets = fusion.plan(batch.counts, self.capacity, alignment=multiple)
        batch.expect(self.buckets)
        self.watch = watcher(batch, self.buckets, self.context)  # a phase is queued

    @property
    def multiple(self) -> int:
        """Elements at whose multiples pieces begin."""
        return alignment(self.itemsize)

    def gpu_slot(self, bucket: fusion.Bucket, stream: Stream) -> GpuSlot:
        """A bucket in the form that kernels on a stream need."""
        counts = [piece.high - piece.low for piece in bucket.pieces]
        table = self.gpu.kernels.table(bucket.starts, counts, self.itemsize, stream)
        inputs = [address(self.batch.inputs[number], low) for number, low, _ in bucket.pieces]
        outputs = [address(self.batch.outputs[number], low) for number, low, _ in bucket.pieces]
        return GpuSlot(table, inputs, outputs, bucket.length)

    def through_host(
        self, collective: Callable[[Any, int], Steps[None]], width: int, in_order: bool = False
    ) -> Steps[None]:
        """Copy each slot down, run `collective(elements, channel)` on it in place, copy it up.

        `width` slots are in flight, each with its own stream, pinned memory and channel; in_order: only copies overlap,
        and the collectives run one after the other.
        """
        self.paths.start()
        start = self.gpu.stream.record()
        order = Order(self.context.transport.rank)

        def steps(number: int) -> Steps[None]:
            channel = number % width
            stage = self.paths.stages[channel]
            stage.stream.wait(start)
            slot = self.down(number, stage)
            yield Done(stage.stream.record(), self.context.transport.rank)
            if in_order:
                yield InOrder(order, number)
            self.watch(number, shared.REDUCE)
            nbytes = slot.length * self.itemsize
            elements = stage.pinned(nbytes).elements(self.element.storage, nbytes)
            fusion.clear_gaps(self.buckets[number], elements)
            yield from collective(elements, channel)
            order.passed = number + 1
            self.up(number, slot, stage)

        yield from overlapped((steps(number) for number in range(len(self.buckets))), width)

    def down(self, number: int, stage: Stage) -> GpuSlot:
        """Queue the gathering of a slot, and its copy to the host."""
        self.watch(number, shared.PACK)
        slot = self.gpu_slot(self.buckets[number], stage.stream)
        block, pinned = stage.block(self.capacity * self.itemsize), stage.pinned(self.capacity * self.itemsize)
        self.gpu.kernels.gather(slot.table, slot.inputs, block.pointer, stage.stream)
        stage.stream.copy(pinned.pointer, block.pointer, slot.length * self.itemsize)
        return slot

    def up(self, number: int, slot: GpuSlot, stage: Stage) -> None:
        """Queue the copy of a slot back to the GPU, and its scattering."""
        self.watch(number, shared.COPY)
        nbytes = slot.length * self.itemsize
        block = stage.block(nbytes)
        stage.stream.copy(block.pointer, stage.pinned(nbytes).pointer, nbytes)
        self.gpu.kernels.scatter(slot.table, [block.pointer], slot.length, slot.outputs, stage.stream)
        self.gpu.stream.wait(stage.stream.record())
        self.watch(number, shared.DONE)


def address(buffer: Buffer, low: int = 0) -> int:
    """The address of element `low` of GPU memory."""
    if not isinstance(buffer, GpuBuffer):
        raise TypeError(f"host memory among GPU arrays: {buffer.device}")
    return buffer.pointer + low * buffer.element.itemsize


class GpuReduction(GpuBatch):
    """The all-reduce of one batch; made when it is planned, so that its owners know how many slots to wait for."""

    def __init__(self, batch: Batch, reduction: Reduction, path: str, paths: GpuPaths) -> None:
        """path: see GpuPaths.choose."""
        self.reduction, self.path = reduction, path
        # of the host, for `host_staged`
        algorithms = paths.context.algorithms
        self.algorithm = algorithms.choose(batch.nbytes, reduction) if path == "host_staged" else ""
        if self.algorithm:
            self.reduction = algorithms.on_wire(self.algorithm, reduction)
        super().__init__(batch, self._slot_bytes(paths.context.settings), paths)
        if self.context.debugs:
            what = f"allreduce of {len(batch.inputs)} GPU tensors, {batch.nbytes} B of {reduction.element.name}"
            how = f"{path} {self.algorithm}".rstrip() + (f", {reduction.wire}" if reduction.wire else "")
            LOGGER.debug(f"{what}: {how}, in {len(self.buckets)} slots")

    @property
    def multiple(self) -> int:
        """See `GpuBatch`; encoded, each tensor has blocks of its own."""
        return super().multiple if self.reduction.wire is None else quantized.BLOCK

    def run(self) -> Steps[None]:
        """Queue it all."""
        paths = {"ipc": self._ipc, "cuda_aware": self._cuda_aware, "host_staged": self._host_staged}
        yield from paths.get(self.path, self._nccl)()

    def _slot_bytes(self, settings: Settings) -> int:
        if self.algorithm in ("shared", "hierarchical"):
            return WINDOW_SLOT_BYTES
        nbytes = settings.fusion_slot_bytes if self.algorithm else settings.cuda_slot_bytes
        if self.path == "ipc":
            return nbytes
        # blocks hold the sums, and for a ring the finished elements behind them
        return nbytes * self.reduction.element.itemsize // self.reduction.sum_type.itemsize

    # The paths

    def _nccl(self) -> Steps[None]:
        """NCCL sums, unless there is one rank; the kernels before and after it scale and divide."""
        kernels, communicator = self.gpu.kernels, self.paths.nccl
        reduction = divided_first(self.reduction) if self.path else self.reduction
        stage = self.paths.nccl_stage if self.path else self.paths.blocks[0]
        if stage is None or (communicator is None) == bool(self.path):
            raise AssertionError("the path is nccl, but there is no communicator")
        if self.path:
            self._leave_the_engines_stream(stage.stream)
        element = nccl_element(reduction) if self.path else TABLE[reduction.sum_type.name]
        wide = element != reduction.element
        block = stage.block(self.context.settings.cuda_slot_bytes).pointer  # never grows: freeing waits for all kernels
        for number, each in enumerate(self.buckets):
            slot = self.gpu_slot(each, stage.stream)
            self.watch(number, shared.PACK)
            kernels.load(slot.table, slot.inputs, block, reduction, stage.stream, wide=wide)
            self.watch(number, shared.REDUCE)
            if communicator is not None:
                communicator.allreduce(block, slot.length, element, reduction.op, stage.stream)
            self.watch(number, shared.COPY)
            kernels.store(slot.table, block, slot.outputs, reduction, stage.stream, wide=wide)
            self.watch(number, shared.DONE)
        yield from ()

    def _leave_the_engines_stream(self, stream: Stream) -> None:
        """Make another stream wait for the inputs, and the owners for it, without the engine's stream."""
        for owner in dict.fromkeys(self.batch.owners):
            self.gpu.begin(owner, stream)

    def _ipc(self) -> Steps[None]:
        """See gpu/ipc_allreduce.py; in an elastic job this rank publishes meanwhile what its GPU has done."""
        stream, peers = self.gpu.stream, self.paths.slots
        if peers is None:
            raise AssertionError("the path is ipc, but no slots are mapped")
        slots = [self.gpu_slot(each, stream) for each in self.buckets]
        work = [MappedSlot(each, peers, self.reduction, self.gpu.kernels, stream) for each in slots]
        for each in shared.pipelined(work, peers.flags, self.watch):
            yield PublishedWhenDone(each, peers) if peers.elastic else each

    def _cuda_aware(self) -> Steps[None]:
        """Rings of GPU memory, summed by the GPU; all on the engine's stream, for which outgoing messages wait."""
        slots = range(len(self.buckets))
        yield from overlapped((self._ring(number, number % BUCKETS_IN_FLIGHT) for number in slots), BUCKETS_IN_FLIGHT)

    def _ring(self, number: int, channel: int) -> Steps[None]:
        stream, kernels, reduction = self.gpu.stream, self.gpu.kernels, self.reduction
        slot = self.gpu_slot(self.buckets[number], stream)
        sum_bytes, finished_bytes = self.capacity * reduction.sum_type.itemsize, self.capacity * self.itemsize
        nbytes = sum_bytes + finished_bytes + ring.RECEIVES_AHEAD * GPU_SEGMENT_BYTES
        block = self.paths.blocks[channel].block(nbytes)
        partial = block.elements(reduction.sum_type, 0, slot.length * reduction.sum_type.itemsize)
        offset = 0 if reduction.in_place else sum_bytes
        finished = block.elements(reduction.element.storage, offset, offset + slot.length * self.itemsize)
        scratch = block.elements(reduction.sum_type, sum_bytes + finished_bytes, nbytes)
        self.watch(number, shared.PACK)
        kernels.load(slot.table, slot.inputs, block.pointer, reduction, stream, wide=True)
        self.watch(number, shared.REDUCE)
        transport, workspace = self.context.algorithms.ring_channels[channel], ring.Workspace(partial, scratch)
        yield from ring.allreduce(finished, transport, reduction, GPU_SEGMENT_BYTES, workspace)
        self.watch(number, shared.COPY)
        kernels.scatter(slot.table, [block.pointer + offset], slot.length, slot.outputs, stream)
        self.watch(number, shared.DONE)

    def _host_staged(self) -> Steps[None]:
        """Copy down, reduce as the host's own arrays, copy up."""
        if self.algorithm in ("shared", "hierarchical"):
            yield from self.through_host(self._in_window, width=2, in_order=True)
        else:
            yield from self.through_host(self._by_messages, BUCKETS_IN_FLIGHT)

    def _by_messages(self, flat: Any, channel: int) -> Steps[None]:
        collective = functools.partial(
            point_to_point.allreduce, self.algorithm, self.reduction, channel, self.context, flat
        )
        if not point_to_point.is_wide(self.algorithm, self.reduction):
            yield from collective(None)
            return
        with self.context.fusion_buffer.block() as block:
            partial = view(block, self.reduction.sum_type)[: flat.size]
            partial[...] = self.reduction.widen(flat)
            yield from collective(partial)

    def _in_window(self, flat: Any, _: int) -> Steps[None]:
        step = self.context.settings.shared_slot_bytes // flat.itemsize
        pieces = [flat[low : low + step] for low in range(0, flat.size, step)]
        parts = [[shared.BufferPair(piece, piece)] for piece in pieces]
        yield from self.context.algorithms.through_window(parts, self.reduction)


def nccl_element(reduction: Reduction) -> ElementType:
    """The type in which NCCL sums: int64 to average integers; 16-bit floats as they are."""
    return reduction.element if reduction.in_place or reduction.element.is_half else TABLE[reduction.sum_type.name]


def divided_first(reduction: Reduction) -> Reduction:
    """An average of 16-bit floats as a sum of what each rank has divided: their sum could be more than they hold."""
    if reduction.op is not Average or not reduction.element.is_half:
        return reduction
    return reduction._replace(op=Sum, prescale=reduction.prescale / reduction.size)


def nccl_can(reduction: Reduction) -> bool:
    """True when NCCL supports this reduction."""
    return nccl.supported(nccl_element(reduction), reduction.op)
