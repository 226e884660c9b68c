"""torch's tensors, on the CPU and on a GPU; torch is never imported here, only recognised when the caller has."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.arrays.buffer import Buffer, NotContiguousError, check_places, flat_view, not_contiguous, packed
from ringreduce.arrays.cuda import cupy
from ringreduce.arrays.dtypes import ElementType, element_type
from ringreduce.arrays.gpu_buffer import GpuBuffer
from ringreduce.errors import UnsupportedArrayError

_LAZY = "a conjugated or negated view of another tensor; pass tensor.resolve_conj().resolve_neg()"


class _TorchBuffer(Buffer):
    __slots__ = ()

    def array(self) -> Any:
        """See `Buffer.array`. By `from_numpy` it is on the CPU, whatever torch's default device is."""
        torch = sys.modules["torch"]
        if self.element.name == "bfloat16" or self.element.kind == "V":  # which NumPy does not have
            stored = self.flat.view(f"i{self.element.itemsize}" if self.element.itemsize > 1 else "u1")
            return torch.from_numpy(stored).view(self.dtype).reshape(self.shape)
        return torch.from_numpy(self.flat).reshape(self.shape)


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


def is_torch(array: Any) -> bool:
    """True for a tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


class _TensorMemory:
    """The memory of a host tensor, for NumPy, which keeps this and so the tensor, but forbids no resizing of it."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Any, element: ElementType, strides: tuple[int, ...] | None = None) -> None:
        """strides: in bytes; None: it is contiguous, and seen in one dimension."""
        self.tensor = tensor
        shape = (tensor.numel(),) if strides is None else tuple(tensor.shape)
        at = {"data": (tensor.data_ptr(), False), "shape": shape, "strides": strides}
        self.__array_interface__ = {**at, "typestr": element.storage.str, "version": 3}


def torch_buffer(tensor: Any, writable: bool, resizable: bool = False) -> Buffer:
    """The buffer of a tensor; see `view.as_buffer`.

    resizable: of a contiguous tensor whose memory is resized later, as FSDP does, which tensor.numpy() would forbid.
    """
    if hasattr(tensor, "trigger_wait"):  # torch's AsyncCollectiveTensor, which stands for one until that is there
        tensor = tensor.trigger_wait()
    dtype = tensor.dtype
    element = element_type(dtype)
    if tensor.is_cuda:
        return _torch_gpu_buffer(tensor, element, writable)
    try:
        if resizable or element.kind == "V":
            return _resizable(tensor, element, writable)
        known = tensor.detach() if tensor.requires_grad else tensor
        array = (known.view(sys.modules["torch"].int16) if element.name == "bfloat16" else known).numpy()
    except UnsupportedArrayError:  # which is a RuntimeError, too
        raise
    except Exception as exc:  # also of a subclass's own code, or of a mode's
        if not writable and _is_lazy(tensor):
            return torch_buffer(tensor.detach().resolve_conj().resolve_neg(), False)
        raise _refusal(tensor, str(exc).strip()) from exc
    is_plain = array.flags.carray and array.dtype is element.storage
    flat = array.reshape(-1) if is_plain else flat_view(array, element, writable)
    return _TorchBuffer(flat, element, array.shape, "cpu", dtype)


def _resizable(tensor: Any, element: ElementType, writable: bool) -> Buffer:
    is_odd = tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.is_quantized
    if is_odd or not (tensor.is_cpu and tensor.is_contiguous()):
        if _why_not(tensor):
            raise _refusal(tensor)
        if writable:
            raise not_contiguous(tensor.shape, tensor.stride())
        tensor = tensor.detach().contiguous()
    flat = np.asarray(_TensorMemory(tensor, element))
    return _TorchBuffer(flat, element, tuple(tensor.shape), "cpu", tensor.dtype)


def torch_packed(tensor: Any) -> tuple[Buffer, Callable[[], None]]:
    """The buffer of a contiguous copy of a tensor that is not, or whose memory holds others; and what writes it back.

    Raises: UnsupportedArrayError where its elements share memory.
    """
    if hasattr(tensor, "trigger_wait"):
        tensor = tensor.trigger_wait()
    if tensor.is_cuda or _is_lazy(tensor):
        check_places(tensor.shape, tensor.stride(), 1)
        copy = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return torch_buffer(copy, True), functools.partial(_copy_into, tensor, copy)
    element = element_type(tensor.dtype)
    strides = tuple([each * element.itemsize for each in tensor.stride()])
    flat, back = packed(np.asarray(_TensorMemory(tensor, element, strides)))
    return _TorchBuffer(flat, element, tuple(tensor.shape), "cpu", tensor.dtype), back


def _copy_into(tensor: Any, values: Any) -> None:
    allowed = sys.modules["torch"].inference_mode() if tensor.is_inference() else contextlib.nullcontext()
    with allowed:
        tensor.detach().copy_(values)


def _torch_gpu_buffer(tensor: Any, element: ElementType, writable: bool) -> Buffer:
    if not writable and _is_lazy(tensor):
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if _why_not(tensor):
        raise _refusal(tensor)
    cupy()  # raises where it is missing: our kernels need it
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        if writable:
            raise not_contiguous(tensor.shape, tensor.stride())
        tensor = tensor.contiguous()
    pointer, index = tensor.data_ptr(), tensor.device.index
    return _TorchGpuBuffer(tensor, pointer, index, element, tuple(tensor.shape), tensor.dtype)


def _is_lazy(tensor: Any) -> bool:
    """True for a view whose elements are other than those in its memory."""
    with contextlib.suppress(Exception):  # a parameter that is not initialized has nothing to say
        return bool(tensor.is_conj() or tensor.is_neg())
    return False


def _refusal(tensor: Any, otherwise: str = "") -> UnsupportedArrayError:
    """The error for a tensor that cannot be viewed as a flat array; of a lazy one a copy can be written back."""
    why_not = _why_not(tensor) or otherwise
    return NotContiguousError(why_not) if why_not == _LAZY else UnsupportedArrayError(why_not)


def _why_not(tensor: Any) -> str:
    """Why a tensor cannot be viewed as a flat array; empty when it can."""
    if tensor.layout is not sys.modules["torch"].strided:
        return f"a tensor of layout {tensor.layout} is not dense; pass tensor.to_dense()"
    if tensor.is_nested:
        return "a nested tensor has no single shape; pass its parts as a group"
    kinds = type(tensor), sys.modules["torch"].Tensor
    if len({getattr(each, "__torch_dispatch__", None) for each in kinds}) > 1:
        return f"a {type(tensor).__name__} has no elements of its own; pass plain tensors, as a DTensor's to_local()"
    if element_type(tensor.dtype).name.startswith("q"):
        return "a quantized tensor is more than its elements; pass tensor.int_repr(), its scale and its zero point"
    if _is_lazy(tensor):
        return _LAZY
    if tensor.device.type not in ("cpu", "cuda"):
        return f"a tensor on {tensor.device} cannot be communicated; move it to cpu or cuda"
    return ""
