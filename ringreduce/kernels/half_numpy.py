"""16-bit floats to float32 and back with NumPy alone, which is always there; and the interface of all kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

BLOCK = 32 << 10  # elements at a time: a few blocks of float32, 128 KiB each, stay in a core's second-level cache

Convert = Callable[[Any, Any], None]  # of a source, into a target
SumParts = Callable[[Sequence[Any], Any, Any, Any], None]


class Kernels(NamedTuple):
    """What is done to the elements of one 16-bit type: float16, or bfloat16 held as uint16.

    Arrays are NumPy's, 1-D and contiguous, of equal lengths. A NaN stays a NaN; its payload may change.
    """

    widen: Convert  # `widen(source, target)`: write 16-bit elements into a float32 array; exact
    narrow: Convert  # `narrow(values, target)`: round float32 elements to nearest even, or to infinity
    sum_parts: SumParts
    """`sum_parts(parts, out, divisor, reciprocal)`: add 16-bit arrays in float32, in this order, divide, round.

    `out` may be one of the parts.  divisor, reciprocal: float32 scalars; the reciprocal is 0 unless it is exact.
    """


class _Scratch(threading.local):
    """Each thread's blocks for reuse: new memory from the system would cost more than the arithmetic."""

    def __init__(self) -> None:
        self.total, self.other = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        self.bits = np.empty(BLOCK, np.uint32)


scratch = _Scratch()


def blocks(*arrays: Any) -> Any:
    """Cut arrays of equal lengths at the same positions: tuples of blocks of at most BLOCK elements."""
    count = len(arrays[0])
    if count <= BLOCK:
        return (arrays,)
    return (tuple(each[low : low + BLOCK] for each in arrays) for low in range(0, count, BLOCK))


def writable(array: Any) -> Any:
    """The same memory as a writable array, for libraries that accept no other and will not write."""
    if array.flags.writeable:
        return array
    return np.asarray(_Unprotected(array))


class _Unprotected:
    def __init__(self, array: Any) -> None:
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface
        self._owner = array


def _narrow_float16(values: Any, target: Any) -> None:
    with np.errstate(over="ignore"):  # rounds past the largest float16 to infinity, as every framework does
        np.copyto(target, values, casting="same_kind")


def _widen_bfloat16(source: Any, target: Any) -> None:
    for few, wide in blocks(source, target.view(np.uint32)):
        np.copyto(wide, few)
        np.left_shift(wide, np.uint32(16), out=wide)


def _narrow_bfloat16(values: Any, target: Any) -> None:
    """The upper halves, rounded to nearest even (the carry may rightly run into infinity)."""
    for wide, few in blocks(values, target):
        bits = wide.view(np.uint32)
        rounded = np.right_shift(bits, np.uint32(16), out=scratch.bits[: len(bits)])
        np.bitwise_and(rounded, np.uint32(1), out=rounded)
        np.add(rounded, np.uint32(0x7FFF), out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, np.uint32(16), out=rounded)
        np.copyto(few, rounded, casting="unsafe")
        if len(wide) and np.isnan(np.maximum.reduce(wide)):
            few[np.isnan(wide)] = 0x7FC0  # rounding could carry a NaN's payload into infinity


def sum_by(widen: Convert, narrow: Convert, add: Convert | None = None) -> SumParts:
    """`Kernels.sum_parts` by these conversions; `add(part, total)` adds 16-bit elements to float32 ones."""

    def widen_and_add(part: Any, total: Any) -> None:
        other = scratch.other[: len(total)]
        widen(part, other)
        np.add(total, other, out=total)

    def sum_parts(parts: Sequence[Any], out: Any, divisor: Any, reciprocal: Any) -> None:
        for target, first, *rest in blocks(out, *parts):
            total = scratch.total[: len(target)]
            widen(first, total)
            for part in rest:
                (add or widen_and_add)(part, total)
            if not reciprocal:
                np.divide(total, divisor, out=total)
            elif reciprocal != 1:
                np.multiply(total, reciprocal, out=total)  # the same bits, and faster
            narrow(total, target)

    return sum_parts


def _kernels(widen: Convert, narrow: Convert) -> Kernels:
    return Kernels(widen, narrow, sum_by(widen, narrow))


KERNELS = {
    "float16": _kernels(lambda source, target: np.copyto(target, source), _narrow_float16),
    "bfloat16": _kernels(_widen_bfloat16, _narrow_bfloat16),
}
