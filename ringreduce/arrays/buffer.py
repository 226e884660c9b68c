"""A flat view of one array's memory, and how to make another like it; for NumPy's arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.arrays.dtypes import ElementType, element_type
from ringreduce.errors import UnsupportedArrayError
from ringreduce.gpu.runtime import cupy


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
        return self.flat.size  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.flat.nbytes  # type: ignore[no-any-return]

    def empty(self, shape: tuple[int, ...]) -> Buffer:
        """A new, uninitialised buffer of this kind and element type, on the same device."""
        flat = np.empty(math.prod(shape), dtype=self.element.storage)
        return type(self)(flat, self.element, shape, self.device, self.dtype)

    def part(self, low: int, count: int) -> Buffer:
        """Elements low to low + count, in the same memory, in one dimension."""
        return type(self)(self.flat[low : low + count], self.element, (count,), self.device, self.dtype)

    def cut(self, counts: Sequence[int]) -> list[Buffer]:
        """Parts of so many elements, one after the other."""
        lows = itertools.accumulate(counts, initial=0)
        return [self.part(low, count) for low, count in zip(lows, counts, strict=False)]

    def array(self) -> Any:
        """The buffer as an array of the caller's kind, in the same memory."""
        return self.flat.view(self.dtype).reshape(self.shape)

    def zero(self) -> None:
        """Make all elements zero."""
        self.flat.fill(0)


class NotContiguousError(UnsupportedArrayError):
    """Memory that is to be written to is not C-contiguous."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__(
            f"an array of shape {tuple(shape)} and strides {tuple(strides)} is not C-contiguous; pass a contiguous copy"
        )


def numpy_buffer(array: np.ndarray[Any, Any], writable: bool) -> Buffer:
    """The buffer of a NumPy array; see `view.as_buffer`."""
    dtype = array.dtype
    element = element_type(dtype)
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise UnsupportedArrayError(
            "a masked array would lose its mask; pass array.filled(value), or array.compressed()"
        )
    return Buffer(flat_view(array, element, writable), element, array.shape, "cpu", dtype)


def flat_view(array: Any, element: ElementType, writable: bool) -> Any:
    """A 1-D view; a copy of what is not C-contiguous, unless it is to be written to."""
    if writable and not array.flags.carray:  # one look instead of two
        if not array.flags.writeable:
            raise UnsupportedArrayError("a read-only array cannot be changed in place; pass a copy")
        if not array.flags.c_contiguous:
            raise NotContiguousError(array.shape, array.strides)
    flat = array if writable and array.ndim == 1 else array.ravel()  # copies what is not C-contiguous
    return flat if flat.dtype is element.storage else flat.view(element.storage)


def message_bytes(flat: Any) -> Any:
    """The bytes of an array, for a message to read or write.

    For GPU memory it blocks until CuPy's current stream is done, and MPI must be CUDA-aware.
    """
    if not isinstance(flat, np.ndarray):
        cupy().cuda.get_current_stream().synchronize()
    return flat.view(np.uint8)
