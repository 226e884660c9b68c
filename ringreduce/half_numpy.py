"""16-bit floats to float32 and back with NumPy alone: the kernels that are always there."""

from __future__ import annotations

from typing import Any

import numpy as np


def widen_float16(source: Any, target: Any) -> None:
    """Write float16 elements into a float32 array of equal length."""
    np.copyto(target, source)


def narrow_float16(values: Any, target: Any) -> None:
    """Round float32 elements into a float16 array: to nearest even, past the largest to infinity."""
    with np.errstate(over="ignore"):
        np.copyto(target, values, casting="same_kind")


def widen_bfloat16(source: Any, target: Any) -> None:
    """Write bfloat16 elements, held as uint16, into a float32 array of equal length."""
    bits = target.view(np.uint32)
    np.copyto(bits, source)
    np.left_shift(bits, np.uint32(16), out=bits)


def narrow_bfloat16(values: Any, target: Any) -> None:
    """Round float32 elements to bfloat16, held as uint16: to nearest even, past the largest to infinity."""
    bits = values.view(np.uint32)
    rounded = np.right_shift(bits, np.uint32(16))
    np.bitwise_and(rounded, np.uint32(1), out=rounded)
    np.add(rounded, np.uint32(0x7FFF), out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, np.uint32(16), out=rounded)
    np.copyto(target, rounded, casting="unsafe")
    if values.size and np.isnan(np.maximum.reduce(values)):
        target[np.isnan(values)] = 0x7FC0  # rounding could carry a NaN's payload into infinity
