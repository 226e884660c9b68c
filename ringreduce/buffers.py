"""One flat view over any array: NumPy, CuPy, torch, and objects with DLPack or the CUDA array interface.

A `Buffer` shares the caller's memory, so a collective that writes to `flat` writes to the caller's array. No layer
above asks which library an array came from; frameworks are never imported here, only recognised when the caller has
imported them.

GPU memory is ordered by streams: an array holds its elements once the work that its library has queued on the current
stream is done. `ready` records that point, for other streams to wait for; `follow` makes the caller's stream wait for
an event. Only `message_bytes` passes GPU memory to MPI: it first waits for the work that produced it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce.dtypes import ElementType, element_type
from ringreduce.errors import UnsupportedArrayError
from ringreduce.gpu import runtime as cuda
from ringreduce.gpu.runtime import Event, cupy

DLPACK_CPU, DLPACK_CUDA = 1, 2  # DLPack's device types


class Buffer:
    """A flat view of an array's memory, and how to make another array like it; this class is NumPy's.

    One is made for each tensor of each step, so it has slots and no checks.
    """

    __slots__ = ("device", "dtype", "element", "flat", "shape")
    on_gpu = False

    def __init__(self, flat: Any, element: ElementType, shape: tuple[int, ...], device: str, dtype: Any) -> None:
        self.flat = flat  # 1-D NumPy or CuPy array of `element.storage`: the caller's memory
        self.element = element
        self.shape = shape
        self.device = device  # "cpu", or "cuda:0" and the like
        self.dtype = dtype  # the caller's library's own element type

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self.flat.size)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.flat.nbytes)

    def empty(self, shape: tuple[int, ...]) -> Buffer:
        """A new, uninitialised buffer of this kind and element type, on the same device."""
        flat = np.empty(math.prod(shape), dtype=self.element.storage)
        return type(self)(flat, self.element, shape, self.device, self.dtype)

    def array(self) -> Any:
        """The buffer as an array of the caller's kind, in the same memory."""
        return self.flat.view(self.dtype).reshape(self.shape)


class _TorchBuffer(Buffer):
    __slots__ = ()

    def array(self) -> Any:
        torch = sys.modules["torch"]
        if self.element.name == "bfloat16":
            return torch.as_tensor(self.flat.view(np.int16)).view(self.dtype).reshape(self.shape)
        return torch.as_tensor(self.flat).reshape(self.shape)


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
        self.device = _name(index)
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

    def _like(self, array: Any, pointer: int, shape: tuple[int, ...]) -> Buffer:
        made = type(self)(array, pointer, self.index, self.element, shape, self.dtype)
        made.stream = self.stream
        return made

    def array(self) -> Any:
        """See `Buffer.array`."""
        return self.owner

    def ready(self) -> Event:
        """An event after everything that the caller's stream has queued so far."""
        return cuda.device(self.index).record(self.address(self.stream))

    def follow(self, event: Event) -> None:
        """Make what the calling thread queues from now on, with this library, wait for an event."""
        cuda.device(self.index).wait(self.address(self.current_stream(self.index)), event)


class _TorchGpuBuffer(GpuBuffer):
    __slots__ = ()

    @staticmethod
    def current_stream(index: int) -> Any:
        return sys.modules["torch"].cuda.current_stream(index)

    @staticmethod
    def address(stream: Any) -> int:
        return int(stream.cuda_stream)

    def empty(self, shape: tuple[int, ...]) -> Buffer:
        torch = sys.modules["torch"]
        with torch.cuda.stream(self.stream):
            tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self._like(tensor, tensor.data_ptr(), shape)


@functools.cache
def _name(index: int) -> str:
    return f"cuda:{index}"


def ready(inputs: Sequence[Buffer]) -> tuple[Event, ...]:
    """The events for which a stream must wait before it uses these buffers, one per stream; none for host memory."""
    streams = {(each.index, each.address(each.stream)): each for each in inputs if isinstance(each, GpuBuffer)}
    return tuple(each.ready() for each in streams.values())


def as_buffer(array: Any, *, writable: bool = False) -> Buffer:
    """A view of `array`, sharing its memory; a Python or NumPy number becomes a 0-d array.

    An array that is not C-contiguous is copied, unless it is to be written to: see `to_write`.
    Raises: UnsupportedArrayError when it is not an array, its element type is not supported, or it is to be written to
            and is read-only or not C-contiguous; MissingExtraError for GPU memory without CuPy.
    """
    if isinstance(array, np.ndarray):
        return _numpy_buffer(array, writable)
    if _is_torch(array):
        if writable and not array.is_inference():  # autograd may have saved it, and must see the change
            sys.modules["torch"].autograd.graph.increment_version(array)
        return _torch_buffer(array, writable)
    if isinstance(array, bool | int | float | complex | np.generic):
        if writable:
            raise UnsupportedArrayError(f"a {type(array).__name__} cannot be changed in place; pass an array")
        return _numpy_buffer(np.asarray(array), writable)
    if _is_cupy(array):
        return _cupy_buffer(array, writable)
    if _is_traced(array):
        raise UnsupportedArrayError(
            "a traced value of JAX has no elements yet; call this outside of jax.jit, or from jax.pure_callback"
        )
    if _is_on_gpu_by_dlpack(array):
        return _foreign_gpu_buffer(array, writable)
    if hasattr(array, "__cuda_array_interface__"):
        return _cupy_buffer(cupy().asarray(array), writable)
    if hasattr(type(array), "__dlpack__"):  # not through __getattr__: a container that forwards to its array is not one
        return _dlpack_buffer(array, writable)
    raise UnsupportedArrayError(f"a {_kind(array)} is not an array; {_instead_of(array)}")


def _instead_of(array: Any) -> str:
    """What to pass instead of something that is not an array."""
    if isinstance(array, Mapping):
        return "pass grouped_allreduce a list of its arrays: dict(zip(d, grouped_allreduce(list(d.values()))))"
    if isinstance(array, list | tuple):
        return "pass numpy.array(...) of numbers, or many arrays to grouped_allreduce"
    if isinstance(array, str):
        return "pass list(d.values()) of a dict of arrays"
    return "expected a NumPy, CuPy or torch array, or an object with __dlpack__ or __cuda_array_interface__"


def _kind(array: Any) -> str:
    kind = type(array)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class _NotContiguousError(UnsupportedArrayError):
    """Memory that is to be written to is not C-contiguous."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__(
            f"an array of shape {tuple(shape)} and strides {tuple(strides)} is not C-contiguous; pass a contiguous copy"
        )


def to_write(arrays: Sequence[Any]) -> tuple[list[Buffer], Callable[[], None]]:
    """Buffers for results that go into `arrays`, and a function to call when they are complete.

    The buffer of an array that is not C-contiguous (torch's channels_last, a transposed one) is a copy, which that
    function writes back.
    """
    try:
        return [as_buffer(array, writable=True) for array in arrays], lambda: None
    except _NotContiguousError:  # rare, so not checked first: that would cost every submission
        copies = [contiguous_copy(array) for array in arrays]
    pairs = list(zip(arrays, copies, strict=True))

    def written() -> None:
        for array, copy in pairs:
            if copy is not None:
                assign(array, copy)

    return [as_buffer(array if copy is None else copy, writable=True) for array, copy in pairs], written


def contiguous_copy(array: Any) -> Any:
    """A C-contiguous copy of a writable NumPy, CuPy or torch array that is not C-contiguous; else None."""
    if _is_torch(array):
        dense = array.layout is sys.modules["torch"].strided
        return array.detach().contiguous() if dense and not array.is_contiguous() else None
    if not (isinstance(array, np.ndarray) or _is_cupy(array)) or array.flags.c_contiguous:
        return None
    return array.copy(order="C") if _is_cupy(array) or array.flags.writeable else None


def assign(array: Any, values: Any) -> None:
    """Write `values`, an array of the same kind and shape, into `array`."""
    if _is_torch(array):
        array.detach().copy_(values)
    else:
        array[...] = values


def fill(buffer: Buffer, values: np.ndarray[Any, Any]) -> None:
    """Write `buffer.count` host values into it, converted to its type; what the caller queues next sees them."""
    values = values.astype(buffer.element.storage)
    if isinstance(buffer, GpuBuffer):
        with cuda.device(buffer.index) as gpu:
            writer = GpuBuffer.address(GpuBuffer.current_stream(buffer.index))  # CuPy's; torch's may differ
            gpu.wait(writer, buffer.ready())
            buffer.flat.set(values.reshape(-1))
            buffer.follow(gpu.record(writer))
    else:
        buffer.flat[...] = values.reshape(-1)


def message_bytes(flat: Any) -> Any:
    """The bytes of an array, for a message to read or write.

    For GPU memory it blocks until CuPy's current stream is done, and MPI must be CUDA-aware.
    """
    if not isinstance(flat, np.ndarray):
        cupy().cuda.get_current_stream().synchronize()
    return flat.view(np.uint8)


def empty_like(flat: Any, count: int, dtype: np.dtype[Any]) -> Any:
    """An uninitialised array of `count` elements on the device of `flat`."""
    return (np if isinstance(flat, np.ndarray) else cupy()).empty(count, dtype=dtype)


def _numpy_buffer(array: np.ndarray[Any, Any], writable: bool) -> Buffer:
    dtype, flags = array.dtype, array.flags
    element = element_type(dtype)
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise UnsupportedArrayError(
            "a masked array would lose its mask; pass array.filled(value), or array.compressed()"
        )
    if writable and not flags.writeable:
        raise UnsupportedArrayError("a read-only array cannot be changed in place; pass a copy")
    return Buffer(_flat(array, element, writable), element, array.shape, "cpu", dtype)


def _flat(array: Any, element: ElementType, writable: bool) -> Any:
    if writable and not array.flags.c_contiguous:
        raise _NotContiguousError(array.shape, array.strides)
    flat = array.reshape(-1)  # copies what is not C-contiguous
    return flat if flat.dtype is element.storage else flat.view(element.storage)


def _cupy_buffer(array: Any, writable: bool) -> Buffer:
    element = element_type(array.dtype)
    if not array.flags.c_contiguous:
        if writable:
            raise _NotContiguousError(array.shape, array.strides)
        array = array.copy(order="C")
    return GpuBuffer(array, int(array.data.ptr), array.device.id, element, tuple(array.shape), array.dtype)


def _is_cupy(array: Any) -> bool:
    module = sys.modules.get("cupy")
    return module is not None and isinstance(array, module.ndarray)


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _torch_buffer(tensor: Any, writable: bool) -> Buffer:
    dtype = tensor.dtype
    element = element_type(dtype)
    if tensor.is_cuda:
        return _torch_gpu_buffer(tensor, element, writable)
    try:
        array = _as_numpy_knows(tensor, element).numpy()
    except (TypeError, RuntimeError) as exc:
        raise UnsupportedArrayError(_why_not(tensor) or str(exc)) from exc
    return _TorchBuffer(_flat(array, element, writable), element, array.shape, "cpu", dtype)


def _torch_gpu_buffer(tensor: Any, element: ElementType, writable: bool) -> Buffer:
    why_not = _why_not(tensor)
    if why_not:
        raise UnsupportedArrayError(why_not)
    cupy()  # raises where it is missing: our kernels need it
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        if writable:
            raise _NotContiguousError(tensor.shape, tensor.stride())
        tensor = tensor.contiguous()
    pointer, index = tensor.data_ptr(), tensor.device.index
    return _TorchGpuBuffer(tensor, pointer, index, element, tuple(tensor.shape), tensor.dtype)


def _as_numpy_knows(tensor: Any, element: ElementType) -> Any:
    """The same memory without autograd history, bfloat16 as int16, which NumPy knows."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.view(sys.modules["torch"].int16) if element.name == "bfloat16" else tensor


def _why_not(tensor: Any) -> str:
    """Why a tensor cannot be viewed as a flat array; empty when it can."""
    if tensor.layout is not sys.modules["torch"].strided:
        return f"a tensor of layout {tensor.layout} is not dense; pass tensor.to_dense()"
    if tensor.is_nested:
        return "a nested tensor has no one shape; pass its parts as a group"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugated or negated view of another tensor; pass tensor.resolve_conj().resolve_neg()"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"a tensor on {tensor.device} cannot be communicated; move it to cpu or cuda"
    return ""


def _is_traced(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


def _is_on_gpu_by_dlpack(array: Any) -> bool:
    return hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] == DLPACK_CUDA


def _foreign_gpu_buffer(array: Any, writable: bool) -> Buffer:
    """JAX and others: DLPack orders CuPy's current stream after their work. Results are CuPy arrays."""
    if writable:
        raise UnsupportedArrayError(_cannot_change(array))
    return _cupy_buffer(cupy().from_dlpack(array), writable)


def _dlpack_buffer(array: Any, writable: bool) -> Buffer:
    device_type, _ = array.__dlpack_device__()
    if device_type != DLPACK_CPU:
        raise UnsupportedArrayError(
            f"a {_kind(array)} on DLPack device {device_type}; move it to the CPU or a CUDA GPU"
        )
    try:
        view = np.from_dlpack(array)
    except (BufferError, RuntimeError) as exc:
        if not hasattr(array, "__array__"):
            raise UnsupportedArrayError(f"a {_kind(array)} that NumPy cannot view through DLPack: {exc}") from exc
        view = np.asarray(array)  # JAX's bfloat16: DLPack has it, NumPy only through ml_dtypes
        view.flags.writeable = False
    if writable and not view.flags.writeable:
        raise UnsupportedArrayError(_cannot_change(array))
    return _numpy_buffer(view, writable)


def _cannot_change(array: Any) -> str:
    return (
        f"a {_kind(array)} cannot be changed in place; use the function without the underscore, or broadcast_object "
        "instead of broadcast_parameters"
    )
