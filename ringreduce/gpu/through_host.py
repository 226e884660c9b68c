"""GPU arrays in operations that need host memory, which all but all-reduces do: copied down before, and up after."""

from __future__ import annotations

from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.gpu_buffer import GpuBuffer
from ringreduce.execution.context import Context
from ringreduce.gpu.runtime import Pinned
from ringreduce.gpu.stage import Done
from ringreduce.transport.base import Steps


def down(tensor: Buffer, context: Context) -> Steps[Any]:
    """A tensor's elements on the host: its own memory, or a copy of GPU memory, which the caller may change."""
    if not isinstance(tensor, GpuBuffer):
        return tensor.flat
    pinned, stream = Pinned(tensor.nbytes), context.gpu.stream
    stream.copy(pinned.pointer, tensor.pointer, tensor.nbytes)
    yield Done(stream.record(), context.transport.rank)
    return pinned.elements(tensor.element.storage, tensor.nbytes)


def room(result: Buffer) -> Any:
    """Host memory for a result's elements: its own, or pinned memory from which `up` copies."""
    return Pinned(result.nbytes).elements(result.element.storage, result.nbytes) if result.on_gpu else result.flat


def up(elements: Any, result: Buffer, context: Context) -> None:
    """Queue the copy of the elements from `down` or `room` into a result on the GPU."""
    if isinstance(result, GpuBuffer):
        context.gpu.stream.copy(result.pointer, elements.ctypes.data, result.nbytes)
        context.gpu.retire([elements])
