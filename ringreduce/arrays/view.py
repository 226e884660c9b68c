"""The buffer of any array: NumPy, CuPy, torch, and objects with DLPack or the CUDA array interface."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ringreduce.arrays.buffer import Buffer, NotContiguousError, numpy_buffer
from ringreduce.arrays.dlpack import dlpack_buffer, foreign_gpu_buffer, is_on_gpu, is_traced, kind_of
from ringreduce.arrays.gpu_buffer import cupy_buffer, is_cupy
from ringreduce.arrays.torch_tensor import is_torch, torch_buffer
from ringreduce.errors import UnsupportedArrayError
from ringreduce.gpu.runtime import cupy


def as_buffer(array: Any, writable: bool = False) -> Buffer:
    """A view of `array`, sharing its memory; a Python or NumPy number becomes a 0-d array.

    An array that is not C-contiguous is copied, unless it is to be written to: see `to_write`.
    Raises: UnsupportedArrayError when it is not an array, its element type is not supported, or it is to be written to
            and is read-only or not C-contiguous; MissingExtraError for GPU memory without CuPy.
    """
    if isinstance(array, np.ndarray):
        return numpy_buffer(array, writable)
    if is_torch(array):
        if writable and not array.is_inference():  # autograd may have saved it, and must see the change
            sys.modules["torch"].autograd.graph.increment_version(array)
        return torch_buffer(array, writable)
    if isinstance(array, bool | int | float | complex | np.generic):
        if writable:
            raise UnsupportedArrayError(f"a {type(array).__name__} cannot be changed in place; pass an array")
        return numpy_buffer(np.asarray(array), writable)
    if is_cupy(array):
        return cupy_buffer(array, writable)
    if is_traced(array):
        raise UnsupportedArrayError(
            "a traced value of JAX has no elements yet; call this outside of jax.jit, or use ringreduce.jax"
        )
    if is_on_gpu(array):
        return foreign_gpu_buffer(array, writable)
    if hasattr(array, "__cuda_array_interface__"):
        return cupy_buffer(cupy().asarray(array), writable)
    if hasattr(type(array), "__dlpack__"):  # not through __getattr__: a container that forwards to its array is not one
        return dlpack_buffer(array, writable)
    raise UnsupportedArrayError(f"a {kind_of(array)} is not an array; {_instead_of(array)}")


def _instead_of(array: Any) -> str:
    """What to pass instead of something that is not an array."""
    if isinstance(array, Mapping):
        return "pass its arrays one by one; allreduce takes a dict"
    if isinstance(array, list | tuple):
        return "pass numpy.array(...) of numbers, or a list of arrays to allreduce"
    if isinstance(array, str):
        return "pass a dict of arrays to allreduce, or list(d.values()) to grouped_allreduce"
    return "expected a NumPy, CuPy or torch array, or an object with __dlpack__ or __cuda_array_interface__"


def to_write(arrays: Sequence[Any]) -> tuple[list[Buffer], Callable[[], None]]:
    """Buffers for results that go into `arrays`, and a function to call when they are complete.

    The buffer of an array that is not C-contiguous (torch's channels_last, a transposed one) is a copy, which that
    function writes back.
    """
    try:
        return [as_buffer(array, True) for array in arrays], nothing
    except NotContiguousError:  # rare, so not checked first: that would cost every submission
        copies = [contiguous_copy(array) for array in arrays]
    pairs = list(zip(arrays, copies, strict=True))

    def written() -> None:
        for array, copy in pairs:
            if copy is not None:
                assign(array, copy)

    return [as_buffer(array if copy is None else copy, writable=True) for array, copy in pairs], written


def nothing() -> None:
    """Results are in place already."""


def contiguous_copy(array: Any) -> Any:
    """A C-contiguous copy of a writable NumPy, CuPy or torch array that is not C-contiguous; else None."""
    if is_torch(array):
        dense = array.layout is sys.modules["torch"].strided
        return array.detach().contiguous() if dense and not array.is_contiguous() else None
    if not (isinstance(array, np.ndarray) or is_cupy(array)) or array.flags.c_contiguous:
        return None
    return array.copy(order="C") if is_cupy(array) or array.flags.writeable else None


def assign(array: Any, values: Any) -> None:
    """Write `values`, an array of the same kind and shape, into `array`."""
    if is_torch(array):
        array.detach().copy_(values)
    else:
        array[...] = values
