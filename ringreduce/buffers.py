"""One flat view over anyone's array: NumPy, CuPy, torch, and what speaks DLPack or the CUDA array interface.

A `Buffer` shares the caller's memory, so a collective that writes to `flat` writes to the caller's array. Above this
file nobody asks which library an array came from, or whether it lies on the host or on a GPU; frameworks are never
imported here, only recognised when the caller has imported them.

`outgoing` and `incoming` are the only ways by which memory reaches MPI: they order GPU memory after the work that
produced it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.cuda.runtime import cupy
from ringreduce.dtypes import ElementType, element_type
from ringreduce.errors import UnsupportedArrayError


class Buffer:
    """A flat view of an array's memory, with what is needed to make another array like it. This one is of NumPy.

    One is made for each tensor of each step: with slots and without checks, since that is a cost of submitting.
    """

    __slots__ = ("device", "dtype", "element", "flat", "shape")

    def __init__(self, flat: Any, element: ElementType, shape: tuple[int, ...], device: str, dtype: Any) -> None:
        self.flat = flat
        """1-D NumPy or CuPy array of `element.storage`, C order, the caller's memory."""
        self.element = element
        self.shape = shape
        self.device = device
        """"cpu", or "cuda:0" and the like."""
        self.dtype = dtype
        """The element type as the caller's library has it."""

    @property
    def count(self) -> int:
        """Elements."""
        return int(self.flat.size)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return int(self.flat.nbytes)

    def empty(self, shape: tuple[int, ...]) -> Buffer:
        """A new buffer of this kind and element type, on the same device, not filled."""
        flat = _array_module(self.flat).empty(math.prod(shape), dtype=self.element.storage)
        return type(self)(flat, self.element, shape, self.device, self.dtype)

    def copy(self) -> Buffer:
        """A new buffer with the same elements."""
        return type(self)(self.flat.copy(), self.element, self.shape, self.device, self.dtype)

    def array(self) -> Any:
        """The buffer as an array of the caller's kind, in the same memory."""
        return self.flat.view(self.dtype).reshape(self.shape)

    def settle(self) -> None:
        """Return when what the calling thread has queued on the GPU for this memory is done; at once on the host."""


class _CupyBuffer(Buffer):
    __slots__ = ()

    def settle(self) -> None:
        cupy().cuda.get_current_stream().synchronize()


class _TorchBuffer(Buffer):
    __slots__ = ()

    def array(self) -> Any:
        torch = sys.modules["torch"]
        if self.element.name == "bfloat16":
            return torch.as_tensor(self.flat.view(np.int16)).view(self.dtype).reshape(self.shape)
        return torch.as_tensor(self.flat).reshape(self.shape)


class _TorchGpuBuffer(_TorchBuffer):
    __slots__ = ()

    def settle(self) -> None:
        """The user's thread queues on torch's current stream, the engine's thread on CuPy's: wait for both."""
        sys.modules["torch"].cuda.current_stream(self.device).synchronize()
        cupy().cuda.get_current_stream().synchronize()


def as_buffer(array: Any, *, writable: bool = False) -> Buffer:
    """A view of `array`, sharing its memory; a Python or NumPy number becomes a 0-d array.

    Raises: UnsupportedArrayError when it is no array, is not C-contiguous, holds elements that cannot travel, or is
            read-only although `writable` is asked for; MissingExtraError for GPU memory without CuPy.
    """
    if isinstance(array, np.ndarray):
        return _numpy_buffer(array, writable)
    if _is_torch(array):
        return _torch_buffer(array)
    if isinstance(array, bool | int | float | complex | np.generic):
        if writable:
            raise UnsupportedArrayError(f"a {type(array).__name__} cannot be changed in place; pass an array")
        return _numpy_buffer(np.asarray(array), writable)
    if hasattr(array, "__cuda_array_interface__"):
        return _cupy_buffer(cupy().asarray(array))
    if hasattr(array, "__dlpack__"):
        return _dlpack_buffer(array, writable)
    raise UnsupportedArrayError(
        f"a {type(array).__module__}.{type(array).__qualname__} is no array; expected a NumPy, CuPy or torch array, "
        "or an object with __dlpack__ or __cuda_array_interface__"
    )


def contiguous_copy(array: Any) -> Any:
    """A copy that `as_buffer` takes, of an array of another memory layout (torch's channels_last, a transposed one);

    None when the array is C-contiguous, or none of NumPy, CuPy and torch.
    """
    if _is_torch(array):
        dense = array.layout is sys.modules["torch"].strided
        return array.detach().contiguous() if dense and not array.is_contiguous() else None
    if isinstance(array, np.ndarray) or hasattr(array, "__cuda_array_interface__"):
        return None if array.flags.c_contiguous else array.copy(order="C")
    return None


def assign(array: Any, values: Any) -> None:
    """Write `values`, an array of the same kind and shape, into `array`."""
    if _is_torch(array):
        array.detach().copy_(values)
    else:
        array[...] = values


def outgoing(flat: Any) -> Any:
    """The bytes of `flat` for a message to read: host memory as it is; GPU memory copied down, after its producers."""
    if isinstance(flat, np.ndarray):
        return flat.view(np.uint8)
    return flat.get().view(np.uint8)  # CuPy's get() waits for the current stream


def incoming(flat: Any) -> tuple[Any, Callable[[], None] | None]:
    """Bytes for a message to fill, and what must be called after it came: copying up, for GPU memory."""
    if isinstance(flat, np.ndarray):
        return flat.view(np.uint8), None
    host = np.empty(flat.size, flat.dtype)
    return host.view(np.uint8), lambda: flat.set(host)  # CuPy's set() is ordered on the current stream


def empty_like(flat: Any, count: int, dtype: np.dtype[Any]) -> Any:
    """An array of `count` elements where `flat` lies, not filled."""
    return _array_module(flat).empty(count, dtype=dtype)


def _numpy_buffer(array: np.ndarray[Any, Any], writable: bool) -> Buffer:
    dtype, flags = array.dtype, array.flags
    element = element_type(dtype)
    if not flags.c_contiguous:
        raise UnsupportedArrayError(
            f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous; pass a contiguous copy "
            "(numpy.ascontiguousarray)"
        )
    if writable and not flags.writeable:
        raise UnsupportedArrayError("a read-only array cannot be changed in place; pass a copy")
    return Buffer(_flat(array, element), element, array.shape, "cpu", dtype)


def _flat(array: Any, element: ElementType) -> Any:
    flat = array.reshape(-1)
    return flat if flat.dtype is element.storage else flat.view(element.storage)


def _cupy_buffer(array: Any) -> Buffer:
    element = element_type(array.dtype)
    if not array.flags.c_contiguous:
        raise UnsupportedArrayError(
            f"a GPU array of shape {array.shape} and strides {array.strides} is not C-contiguous; pass a contiguous "
            "copy (cupy.ascontiguousarray)"
        )
    flat = array.reshape(-1).view(element.storage)
    return _CupyBuffer(flat, element, tuple(array.shape), f"cuda:{array.device.id}", array.dtype)


def _is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _torch_buffer(tensor: Any) -> Buffer:
    dtype = tensor.dtype
    element = element_type(dtype)
    if tensor.is_cuda:
        return _torch_gpu_buffer(tensor, element)
    try:
        array = _as_numpy_knows(tensor, element).numpy()
    except (TypeError, RuntimeError) as exc:
        raise UnsupportedArrayError(_why_not(tensor) or str(exc)) from exc
    if not array.flags.c_contiguous:
        raise UnsupportedArrayError(_why_not(tensor))
    return _TorchBuffer(_flat(array, element), element, array.shape, "cpu", dtype)


def _torch_gpu_buffer(tensor: Any, element: ElementType) -> Buffer:
    why_not = _why_not(tensor)
    if why_not:
        raise UnsupportedArrayError(why_not)
    flat = cupy().asarray(_as_numpy_knows(tensor, element).reshape(-1)).view(element.storage)
    return _TorchGpuBuffer(flat, element, tuple(tensor.shape), str(tensor.device), tensor.dtype)


def _as_numpy_knows(tensor: Any, element: ElementType) -> Any:
    """The same memory without history; neither NumPy nor the CUDA array interface knows bfloat16."""
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
    if not tensor.is_contiguous():
        return (
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; pass "
            "tensor.contiguous()"
        )
    return ""


def _dlpack_buffer(array: Any, writable: bool) -> Buffer:
    device_type, _ = array.__dlpack_device__()
    if device_type != 1:  # kDLCPU
        return _cupy_buffer(cupy().from_dlpack(array))
    try:
        return _numpy_buffer(np.from_dlpack(array), writable)
    except (BufferError, RuntimeError) as exc:
        kind = type(array).__qualname__
        raise UnsupportedArrayError(f"a {kind} that NumPy cannot view through DLPack: {exc}") from exc


def _array_module(flat: Any) -> Any:
    return np if isinstance(flat, np.ndarray) else cupy()
