"""16-bit floats to float32 and back: by the compiled module where there is one, else by NumPy, to the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.kernels import native

BLOCK = 32 << 10  # elements that are rounded at a time: 128 KiB of float32 stay in a core's second-level cache


def _narrow_bfloat16(values: Any, target: Any) -> None:
    """The upper halves, rounded to nearest even (the carry may rightly run into infinity)."""
    for low in range(0, len(values), BLOCK):
        wide, few = values[low : low + BLOCK], target[low : low + BLOCK]
        bits = wide.view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        np.copyto(few, rounded, casting="unsafe")
        if np.isnan(np.maximum.reduce(wide)):
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
        np.left_shift(source, np.uint32(16), out=target.view(np.uint32), dtype=np.uint32)


def narrow(name: str, values: Any, target: Any) -> None:
    """Round float32 elements to 16 bits: to nearest, ties to even, or to infinity."""
    if native.module is not None and values.flags.c_contiguous and target.flags.c_contiguous:
        native.module.convert(values, target, name == "bfloat16")
    elif name == "float16":
        with np.errstate(over="ignore"):  # rounds past the largest float16 to infinity, as every framework does
            np.copyto(target, values, casting="same_kind")
    else:
        _narrow_bfloat16(values, target)
