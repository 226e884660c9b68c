"""torch's tensors, on the CPU and on a GPU; torch is never imported here, only recognised when the caller has."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ringreduce.arrays.buffer import Buffer, NotContiguousError, flat_view
from ringreduce.arrays.dtypes import ElementType, element_type
from ringreduce.arrays.gpu_buffer import GpuBuffer
from ringreduce.errors import UnsupportedArrayError
from ringreduce.gpu.runtime import cupy


class _TorchBuffer(Buffer):
    __slots__ = ()

    def array(self) -> Any:
        torch = sys.modules["torch"]
        if self.element.name == "bfloat16":
            return torch.as_tensor(self.flat.view(np.int16)).view(self.dtype).reshape(self.shape)
        return torch.as_tensor(self.flat).reshape(self.shape)


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


class _TensorBytes:
    """A contiguous tensor's bytes, for NumPy, which keeps this and so the tensor."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        at = {"data": (tensor.data_ptr(), False), "shape": (tensor.nbytes,)}
        self.__array_interface__ = {**at, "typestr": "|u1", "version": 3}


def torch_buffer(tensor: Any, writable: bool, resizable: bool = False) -> Buffer:
    """The buffer of a tensor; see `view.as_buffer`.

    resizable: of a contiguous tensor whose memory is resized later, as FSDP does, which tensor.numpy() would forbid.
    """
    dtype = tensor.dtype
    element = element_type(dtype)
    if tensor.is_cuda:
        return _torch_gpu_buffer(tensor, element, writable)
    if resizable and tensor.device.type == "cpu":
        return _TorchBuffer(
            np.asarray(_TensorBytes(tensor)).view(element.storage), element, tuple(tensor.shape), "cpu", dtype
        )
    try:
        known = tensor.detach() if tensor.requires_grad else tensor
        array = (known.view(sys.modules["torch"].int16) if element.name == "bfloat16" else known).numpy()
    except (TypeError, RuntimeError) as exc:
        raise UnsupportedArrayError(_why_not(tensor) or str(exc)) from exc
    return _TorchBuffer(flat_view(array, element, writable), element, array.shape, "cpu", dtype)


def _torch_gpu_buffer(tensor: Any, element: ElementType, writable: bool) -> Buffer:
    why_not = _why_not(tensor)
    if why_not:
        raise UnsupportedArrayError(why_not)
    cupy()  # raises where it is missing: our kernels need it
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        if writable:
            raise NotContiguousError(tensor.shape, tensor.stride())
        tensor = tensor.contiguous()
    pointer, index = tensor.data_ptr(), tensor.device.index
    return _TorchGpuBuffer(tensor, pointer, index, element, tuple(tensor.shape), tensor.dtype)


def _why_not(tensor: Any) -> str:
    """Why a tensor cannot be viewed as a flat array; empty when it can."""
    if tensor.layout is not sys.modules["torch"].strided:
        return f"a tensor of layout {tensor.layout} is not dense; pass tensor.to_dense()"
    if tensor.is_nested:
        return "a nested tensor has no single shape; pass its parts as a group"
    if tensor.is_conj() or tensor.is_neg():
        return "a conjugated or negated view of another tensor; pass tensor.resolve_conj().resolve_neg()"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"a tensor on {tensor.device} cannot be communicated; move it to cpu or cuda"
    return ""
