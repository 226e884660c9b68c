"""What is done with GPU arrays besides all-reduces: between mapped slots on one host, else through the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.buffers import Buffer
from ringreduce.collectives import swapped, tree
from ringreduce.engine.batch import Batch
from ringreduce.engine.context import Context
from ringreduce.engine.gpu_reduction import GpuBatch, address
from ringreduce.ops import Reduction
from ringreduce.transport.base import Steps


def may(tensor: Buffer, context: Context) -> bool:
    """True for GPU memory whose ranks map each other's slots."""
    return tensor.on_gpu and context.routes.gpu.way == "mapped"


class GpuBroadcast:
    """The broadcast of one batch; made when it is planned, so that its owners know what they wait for."""

    def __init__(self, batch: Batch, root: int, context: Context) -> None:
        self._root, self._context = root, context
        self._mapped = may(batch.inputs[0], context)
        slot_bytes = context.settings.cuda_slot_bytes if self._mapped else context.settings.fusion_slot_bytes
        self._work = GpuBatch(batch, slot_bytes, context)

    def run(self) -> Steps[None]:
        """Queue it all."""
        work, context = self._work, self._context
        if not self._mapped:
            yield from work.through_host(self._by_messages)
            return
        stream = context.gpu.stream
        slots = [work.gpu_slot(each, stream) for each in work.slots]
        yield from swapped.broadcast(slots, self._root, _gpu(context), lambda number: work.settle(number, stream))

    def _by_messages(self, flat: Any, channel: int) -> Steps[None]:
        yield from tree.broadcast(flat, self._context.routes.channels[channel], self._root)


def allgather(tensor: Buffer, gathered: Buffer, counts: Sequence[int], context: Context) -> Steps[None]:
    """Queue what fills `gathered` with every rank's elements; counts: of each rank."""
    nbytes = [count * tensor.element.itemsize for count in counts]
    yield from swapped.allgather(address(tensor), address(gathered), nbytes, _gpu(context))


def alltoall(
    tensor: Buffer, result: Buffer, sent: Sequence[int], received: Sequence[int], longest: int, context: Context
) -> Steps[None]:
    """Queue what gives each rank its part; sent, received: elements of each part, longest: of any on any rank."""
    itemsize = tensor.element.itemsize
    sent_bytes, received_bytes = [n * itemsize for n in sent], [n * itemsize for n in received]
    addresses = address(tensor), address(result)
    yield from swapped.alltoall(*addresses, sent_bytes, received_bytes, longest * itemsize, _gpu(context))


def reducescatter(
    tensor: Buffer, part: Buffer, counts: Sequence[int], reduction: Reduction, context: Context
) -> Steps[None]:
    """Queue what reduces this rank's part of all ranks' elements; counts: elements of each part."""
    yield from swapped.reducescatter(address(tensor), address(part), counts, reduction, _gpu(context))


def _gpu(context: Context) -> swapped.Gpu:
    peers, _ = context.routes.gpu.mapping()
    return swapped.Gpu(peers, context.gpu.kernels, context.gpu.stream)
