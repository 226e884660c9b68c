"""GPU memory of CuPy; streams order what is done with it.

An array holds its elements once the work that its library has queued on the current stream is done. `ready` records
that point, for other streams to wait for; `follow` makes the caller's stream wait for an event.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ringreduce.arrays import cuda as cuda
from ringreduce.arrays.buffer import Buffer, not_contiguous
from ringreduce.arrays.cuda import Event, cupy
from ringreduce.arrays.dtypes import ElementType, element_type


class GpuBuffer(Buffer):
    """GPU memory of CuPy: an address, the array that owns it, and the stream on which the caller uses it.

    `flat`, a CuPy array, is made on first use: that costs more than the rest of submitting.
    """

    __slots__ = ("_count", "_flat", "index", "owner", "pointer", "stream")
    on_gpu = True

    def __init__(
        self, owner: Any, pointer: int, index: int, element: ElementType, shape: tuple[int, ...], dtype: Any
    ) -> None:
        self.owner = owner  # the array that keeps the memory alive: the caller's, or one of ours
        self.pointer = pointer  # the address of the first element
        self.index = index  # the GPU's number
        self.stream = self.current_stream(index)  # the library's current stream in the calling thread
        self._count = math.prod(shape)
        self._flat: Any = None
        self.element = element
        self.shape = shape
        self.device = f"cuda:{index}"
        self.dtype = dtype

    @property
    def flat(self) -> Any:
        """1-D CuPy array of `element.storage`, the caller's memory."""
        if self._flat is None:
            self._flat = cuda.view(self.pointer, self.nbytes, self.element.storage, self.owner, self.index)
        return self._flat

    @property
    def count(self) -> int:
        """See `Buffer.count`."""
        return self._count

    @property
    def nbytes(self) -> int:
        """See `Buffer.nbytes`."""
        return self._count * self.element.storage.itemsize

    @property
    def start(self) -> int:
        """See `Buffer.start`."""
        return self.pointer

    @staticmethod
    def current_stream(index: int) -> Any:
        """The stream of GPU number `index` on which the calling thread uses arrays of this library."""
        return cupy().cuda.get_current_stream(index)

    @staticmethod
    def address(stream: Any) -> int:
        """A stream's address."""
        return int(stream.ptr)

    def empty(self, shape: tuple[int, ...]) -> Buffer:
        """See `Buffer.empty`. The memory belongs to the caller's stream: another stream must wait for its `ready`."""
        with cuda.device(self.index):
            if self.current_stream(self.index) == self.stream:  # a `with` would end the caller's stream.use()
                array = cupy().empty(shape, dtype=self.dtype)
            else:
                with self.stream:
                    array = cupy().empty(shape, dtype=self.dtype)
        return self._like(array, int(array.data.ptr), shape)

    def part(self, low: int, count: int) -> Buffer:
        """See `Buffer.part`."""
        return self._like(self.owner, self.pointer + low * self.element.storage.itemsize, (count,))

    def _like(self, array: Any, pointer: int, shape: tuple[int, ...]) -> Buffer:
        made = type(self)(array, pointer, self.index, self.element, shape, self.dtype)
        made.stream = self.stream
        return made

    def array(self) -> Any:
        """See `Buffer.array`."""
        return self.owner

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[Any]:
        """Let CuPy work where the calling thread works with this library, which is the stream that it yields."""
        with cuda.device(self.index):
            before, address = cupy().cuda.get_current_stream(), self.address(self.current_stream(self.index))
            if before.ptr == address:
                yield before
                return
            try:
                with cupy().cuda.ExternalStream(address, self.index) as stream:
                    yield stream
            finally:
                if cupy().cuda.get_current_stream() != before:  # a `with` has ended the caller's stream.use()
                    before.use()

    def zero(self) -> None:
        """See `Buffer.zero`."""
        with self.on_stream():
            self.flat.fill(0)

    def ready(self) -> Event:
        """An event after everything that the caller's stream has queued so far."""
        return cuda.device(self.index).record(self.address(self.stream))

    def follow(self, event: Event) -> None:
        """Make what the calling thread queues from now on, with this library, wait for an event."""
        cuda.device(self.index).wait(self.address(self.current_stream(self.index)), event)


def any_on_gpu(inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> bool:
    """True when one of these is GPU memory, of which there is none without CuPy."""
    return "cupy" in sys.modules and any(each.on_gpu for each in (*inputs, *outputs))


def ready(inputs: Sequence[Buffer]) -> tuple[Event, ...]:
    """The events for which a stream must wait before it uses these buffers, one per stream; none for host memory."""
    streams = {(each.index, each.address(each.stream)): each for each in inputs if isinstance(each, GpuBuffer)}
    return tuple(each.ready() for each in streams.values())


def cupy_buffer(array: Any, writable: bool) -> Buffer:
    """The buffer of a CuPy array; see `view.as_buffer`."""
    element = element_type(array.dtype)
    if not array.flags.c_contiguous:
        if writable:
            raise not_contiguous(array.shape, array.strides)
        array = array.copy(order="C")
    return GpuBuffer(array, int(array.data.ptr), array.device.id, element, tuple(array.shape), array.dtype)


def uploaded(values: Any, index: int) -> Any:
    """A CuPy array of a NumPy array's elements, on GPU `index`."""
    with cuda.device(index):
        return cupy().asarray(values)


def is_cupy(array: Any) -> bool:
    """True for a CuPy array."""
    module = sys.modules.get("cupy")
    return module is not None and isinstance(array, module.ndarray)
