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


def _narrow_float16(values: Any, target: Any) -> None:
    """As native.c does it: NumPy's own conversion takes forty times as long where results are subnormal.

    A number is added whose last place is the result's, so that the sum is rounded where the result has to be.
    """
    for low in range(0, len(values), BLOCK):
        wide, few = values[low : low + BLOCK], target[low : low + BLOCK].view(np.uint16)
        bits = wide.view(np.uint32)
        exponents = bits & np.uint32(0x7F800000)
        np.maximum(exponents, np.uint32(0x38800000), out=exponents)
        exponents += np.uint32(0x07800000)
        with np.errstate(all="ignore"):  # infinity past the largest, as in every framework
            total = np.abs(wide) * np.float32(2.0**112)
            total *= np.float32(2.0**-110)
        total += exponents.view(np.float32)
        rounded = total.view(np.uint32)
        np.right_shift(rounded, np.uint32(13), out=exponents)
        exponents &= np.uint32(0x7C00)
        rounded &= np.uint32(0x0FFF)
        rounded += exponents
        np.right_shift(bits, np.uint32(16), out=exponents)
        exponents &= np.uint32(0x8000)
        rounded |= exponents
        np.copyto(few, rounded, casting="unsafe")
        if np.isnan(np.maximum.reduce(wide)):
            few[np.isnan(wide)] = 0x7E00


def _widen_float16(source: Any, target: Any) -> None:
    """As native.c does it: a number's exponent is moved, a subnormal's bits are made the last ones of 1/2."""
    for low in range(0, len(source), BLOCK):
        few, wide = source[low : low + BLOCK].view(np.uint16), target[low : low + BLOCK]
        twice = few.astype(np.uint32)
        twice <<= np.uint32(17)
        small = twice >> np.uint32(17)
        is_small = small < np.uint32(0x0400)
        small |= np.uint32(126 << 23)
        twice >>= np.uint32(4)
        twice += np.uint32(0xE0 << 23)
        with np.errstate(all="ignore"):
            np.multiply(twice.view(np.float32), np.float32(2.0**-112), out=wide)
        np.subtract(small.view(np.float32), np.float32(0.5), out=wide, where=is_small)
        np.copysign(wide, few.view(np.int16), out=wide)


def widen(name: str, source: Any, target: Any) -> None:
    """Write "float16" or "bfloat16" elements into a float32 or float64 array; exact.

    Here, and below, arrays are NumPy's, 1-D and of equal lengths; bfloat16 is held as uint16. A NaN stays a NaN; its
    payload may change.
    """
    if target.dtype == np.float64:
        for low in range(0, len(source), BLOCK):
            few = source[low : low + BLOCK]
            wide = np.empty(len(few), np.float32)
            widen(name, few, wide)
            target[low : low + BLOCK] = wide
    elif native.module is not None and source.flags.c_contiguous and target.flags.c_contiguous:
        native.module.convert(source, target, name == "bfloat16")
    elif name == "float16":
        _widen_float16(source, target)
    else:
        np.left_shift(source, np.uint32(16), out=target.view(np.uint32), dtype=np.uint32)


def narrow(name: str, values: Any, target: Any) -> None:
    """Round float32 elements to 16 bits: to nearest, ties to even, or to infinity; float64 ones to float32 before."""
    if values.dtype == np.float64:
        for low in range(0, len(values), BLOCK):
            with np.errstate(all="ignore"):
                wide = values[low : low + BLOCK].astype(np.float32)
            narrow(name, wide, target[low : low + BLOCK])
    elif native.module is not None and values.flags.c_contiguous and target.flags.c_contiguous:
        native.module.convert(values, target, name == "bfloat16")
    elif name == "float16":
        _narrow_float16(values, target)
    else:
        _narrow_bfloat16(values, target)
