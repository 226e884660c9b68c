"""16-bit floats to float32 and back: by the compiled module where there is one, else by NumPy, to the same bits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ringreduce.kernels import native

BLOCK = 32 << 10  # elements at a time: a few blocks of float32, 128 KiB each, stay in a core's second-level cache


class _Scratch(threading.local):
    """Each thread's block for reuse: new memory from the system would cost more than the arithmetic."""

    def __init__(self) -> None:
        self.bits = np.empty(BLOCK, np.uint32)


_scratch = _Scratch()


def _blocks(*arrays: Any) -> Any:
    """Cut arrays of equal lengths at the same positions: tuples of blocks of at most BLOCK elements."""
    count = len(arrays[0])
    if count <= BLOCK:
        return (arrays,)
    return (tuple(each[low : low + BLOCK] for each in arrays) for low in range(0, count, BLOCK))


def _narrow_float16(values: Any, target: Any) -> None:
    with np.errstate(over="ignore"):  # rounds past the largest float16 to infinity, as every framework does
        np.copyto(target, values, casting="same_kind")


def _widen_bfloat16(source: Any, target: Any) -> None:
    for few, wide in _blocks(source, target.view(np.uint32)):
        np.copyto(wide, few)
        np.left_shift(wide, np.uint32(16), out=wide)


def _narrow_bfloat16(values: Any, target: Any) -> None:
    """The upper halves, rounded to nearest even (the carry may rightly run into infinity)."""
    for wide, few in _blocks(values, target):
        bits = wide.view(np.uint32)
        rounded = np.right_shift(bits, np.uint32(16), out=_scratch.bits[: len(bits)])
        np.bitwise_and(rounded, np.uint32(1), out=rounded)
        np.add(rounded, np.uint32(0x7FFF), out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, np.uint32(16), out=rounded)
        np.copyto(few, rounded, casting="unsafe")
        if len(wide) and np.isnan(np.maximum.reduce(wide)):
            few[np.isnan(wide)] = 0x7FC0  # rounding could carry a NaN's payload into infinity


def widen(name: str, source: Any, target: Any) -> None:
    """Write "float16" or "bfloat16" elements into a float32 array; exact.

    Here, and below, arrays are NumPy's and of equal lengths; bfloat16 is held as uint16. A NaN stays a NaN; its payload
    may change.
    """
    if native.module is not None and source.flags.c_contiguous and target.flags.c_contiguous:
        native.module.convert(source, target, name == "bfloat16")
    elif name == "float16":
        np.copyto(target, source)
    else:
        _widen_bfloat16(source, target)


def narrow(name: str, values: Any, target: Any) -> None:
    """Round float32 elements to 16 bits: to nearest, ties to even, or to infinity."""
    if native.module is not None and values.flags.c_contiguous and target.flags.c_contiguous:
        native.module.convert(values, target, name == "bfloat16")
    elif name == "float16":
        _narrow_float16(values, target)
    else:
        _narrow_bfloat16(values, target)
