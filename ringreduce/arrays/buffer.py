"""A flat view of one array's memory, and how to make another like it; for NumPy's arrays."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.arrays.cuda import cupy
from ringreduce.arrays.dtypes import ElementType, element_type
from ringreduce.errors import UnsupportedArrayError


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

    @property
    def start(self) -> int:
        """The address of its first element."""
        return self.flat.__array_interface__["data"][0]  # type: ignore[no-any-return]

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
    """Memory that is to be written to is not C-contiguous, or holds other values, as a conjugated view's."""


def not_contiguous(shape: Sequence[int], strides: Sequence[int]) -> NotContiguousError:
    """The error for memory of this form; see `view.to_write`."""
    return NotContiguousError(
        f"an array of shape {tuple(shape)} and strides {tuple(strides)} is not C-contiguous; pass a contiguous copy"
    )


def numpy_buffer(array: np.ndarray[Any, Any], writable: bool) -> Buffer:
    """The buffer of a NumPy array; see `view.as_buffer`. Of a subclass it is that of the plain array."""
    if type(array) is not np.ndarray:
        array = plain(array)
    element = element_type(array.dtype)
    return Buffer(flat_view(array, element, writable), element, array.shape, "cpu", array.dtype)


def plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory without a subclass's own ideas of shapes, slices and arithmetic; not of a masked array."""
    if isinstance(array, np.ma.MaskedArray):
        raise UnsupportedArrayError(
            "a masked array would lose its mask; pass array.filled(value), or array.compressed()"
        )
    return np.asarray(array)


def flat_view(array: Any, element: ElementType, writable: bool) -> Any:
    """A 1-D view; a copy of what is not C-contiguous, unless it is to be written to."""
    if writable and not array.flags.carray:  # one look instead of two
        if not array.flags.writeable:
            raise UnsupportedArrayError("a read-only array cannot be changed in place; pass a copy")
        if not array.flags.c_contiguous:
            raise not_contiguous(array.shape, array.strides)
    flat = array if writable and array.ndim == 1 else array.ravel()  # copies what is not C-contiguous
    return flat if flat.dtype is element.storage else flat.view(element.storage)


def packed(memory: np.ndarray[Any, Any]) -> tuple[Any, Callable[[], None]]:
    """The elements of an array that is not C-contiguous, in one that is, and what writes them back.

    It runs whatever thread calls that: no code of a framework, whose modes are each thread's own.
    Raises: UnsupportedArrayError where elements share memory, as in an expanded or broadcast array.
    """
    check_places(memory.shape, memory.strides, memory.itemsize)
    copy = np.ascontiguousarray(memory)
    return copy.reshape(-1), functools.partial(np.copyto, memory, copy)


def check_places(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
    """Raise UnsupportedArrayError where elements that are to be written to share memory."""
    if shares_elements(shape, strides, itemsize):
        raise UnsupportedArrayError(
            f"an array of shape {tuple(shape)} whose elements share memory, as with expand() or broadcast_to(), "
            "cannot be changed in place; pass a copy: tensor.clone() or array.copy()"
        )


def shares_elements(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """True where two elements may have the same place: unless each stride leads beyond all that smaller ones reach.

    >>> shares_elements((3, 4), (0, 4), 4), shares_elements((3, 4), (4, 12), 4), shares_elements((3, 4), (4, 4), 4)
    (True, False, True)
    """
    if 0 in shape:
        return False
    reached = itemsize - 1
    for stride, count in sorted(
        (abs(stride), count) for stride, count in zip(strides, shape, strict=True) if count > 1
    ):
        if stride <= reached:
            return True
        reached += stride * (count - 1)
    return False


def message_bytes(flat: Any) -> Any:
    """The bytes of an array, for a message to read or write.

    For GPU memory it blocks until CuPy's current stream is done, and MPI must be CUDA-aware.
    """
    if not isinstance(flat, np.ndarray):
        cupy().cuda.get_current_stream().synchronize()
    return flat.view(np.uint8)
