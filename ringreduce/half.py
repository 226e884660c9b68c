"""16-bit floats to float32 and back, by the fastest kernels at hand: numba's, torch's or NumPy's.

All give the same bits. float16 elements are held as float16, bfloat16 ones as uint16. Arrays are NumPy's, 1-D
and contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ringreduce import half_numpy


class Kernels(NamedTuple):
    """What is done to the elements of one 16-bit type; a NaN stays a NaN, its payload may change."""

    widen: Callable[[Any, Any], None]
    """`widen(source, target)`: write 16-bit elements into a float32 array; exact."""
    narrow: Callable[[Any, Any], None]
    """`narrow(values, target)`: round float32 elements to 16 bits: to nearest even, past the largest to infinity."""


_NUMPY = {
    "float16": Kernels(half_numpy.widen_float16, half_numpy.narrow_float16),
    "bfloat16": Kernels(half_numpy.widen_bfloat16, half_numpy.narrow_bfloat16),
}


def kernels(name: str) -> Kernels:
    """The kernels of "float16" or "bfloat16"."""
    return _NUMPY[name]


def kernel_name() -> str:
    """Whose kernels are used: "numba", "torch" or "numpy"."""
    return "numpy"
