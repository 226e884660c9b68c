"""A sum that is divided and written to two places in one pass, with numba.

Imported by copying.py when a job has summed so much that it is worth the second that this takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.kernels.jit import compiled

BLOCK = 1024  # elements at a time: 4 or 8 KiB stay in a core's first-level cache


@compiled
def total(parts: Any, out: Any, copy: Any, divisor: Any, reciprocal: Any) -> None:
    """Add the parts in this order, divide, write to `out`, which may be one of them, and to `copy`: float32 or float64.

    Shape:  1-D, `flags.carray`, equal lengths.  divisor, reciprocal: scalars; the reciprocal is 0 unless it is exact.
    Result: NumPy's bits; a NaN's payload may differ.
    """
    block = np.empty(BLOCK, out.dtype)  # apart from all: LLVM does not vectorise loops whose output may be their input
    for low in range(0, len(out), BLOCK):
        first, second = parts[0][low : low + BLOCK], parts[1][low : low + BLOCK]
        sums = block[: len(first)]
        for i in range(len(sums)):
            sums[i] = first[i] + second[i]
        for k in range(2, len(parts)):
            part = parts[k][low : low + BLOCK]
            for i in range(len(sums)):
                sums[i] += part[i]
        one, other = out[low : low + BLOCK], copy[low : low + BLOCK]
        if reciprocal != 0:
            for i in range(len(sums)):
                value = sums[i] * reciprocal
                one[i] = value
                other[i] = value
        else:
            for i in range(len(sums)):
                value = sums[i] / divisor
                one[i] = value
                other[i] = value


def compile_kernels(count: int) -> None:
    """Compile for so many parts, of both types."""
    for dtype in (np.float32, np.float64):
        arrays = [np.ones(8, dtype) for _ in range(count)]
        total(tuple(arrays), arrays[0], np.ones(8, dtype), dtype(1), dtype(1))
