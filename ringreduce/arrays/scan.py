"""Whether an array has a NaN or an infinity: by its largest element, whose bits are compared as integers.

Without their signs, floating-point numbers are in the order of their bits: 0, the finite ones, infinity, NaN. So
nothing is computed that could overflow itself, no memory is needed, and all types are alike, and as fast as memory: of
signed integers the largest is that of the positive numbers, of unsigned ones that of the negative numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import ElementType
from ringreduce.arrays.gpu_buffer import GpuBuffer

BLOCK_BYTES = 512 << 10  # the second of two passes finds it in a core's cache


def largest(buffer: Buffer) -> Callable[[], int]:
    """What returns the bits of the largest of an array's floating-point elements, without its sign.

    Cost: reads it once. On a GPU that is queued on the caller's stream, and to call what is returned is to wait for it.
    """
    element = buffer.element
    size = element.itemsize if element.kind == "f" else element.itemsize // 2  # complex: both parts
    without_sign = (1 << (8 * size - 1)) - 1
    if isinstance(buffer, GpuBuffer):
        return _queued(buffer, size, without_sign)
    signed, unsigned = buffer.flat.view(f"i{size}"), buffer.flat.view(f"u{size}")
    found, step = 0, BLOCK_BYTES // size
    for low in range(0, len(signed), step):
        positive = int(np.maximum.reduce(signed[low : low + step]))
        negative = int(np.maximum.reduce(unsigned[low : low + step])) & without_sign
        found = max(found, positive, negative)
    return lambda: found


def _queued(buffer: GpuBuffer, size: int, without_sign: int) -> Callable[[], int]:
    with buffer.on_stream() as stream:
        parts = buffer.flat.view(f"i{size}").max(), buffer.flat.view(f"u{size}").max()

    def read() -> int:
        with buffer.on_stream():
            positive, negative = (int(each.get(stream=stream)) for each in parts)
        return max(positive, negative & without_sign)

    return read


def problem(bits: int, element: ElementType) -> str:
    """What elements are whose largest has these bits: NaN, infinity, or, empty, finite."""
    limit = _infinity(element)
    return "" if bits < limit else "infinity" if bits == limit else "NaN"


@functools.lru_cache(maxsize=256)
def _infinity(element: ElementType) -> int:
    return _bits(np.inf, element)


@functools.lru_cache(maxsize=256)
def summable(element: ElementType, factor: float) -> int:
    """The bits of the largest number that can be multiplied by `factor`, and a little more, without an overflow."""
    real = np.float32 if element.name == "bfloat16" else np.zeros(1, element.storage).real.dtype
    return _bits(0.99 * float(np.finfo(real).max) / factor, element)


def _bits(value: float, element: ElementType) -> int:
    if element.name == "bfloat16":
        return int(np.array(value, np.float32).view(np.uint32)) >> 16
    number = np.zeros(1, element.storage).real.copy()
    with np.errstate(all="ignore"):  # it may be too large for the type
        number[...] = value
    return int(number.view(f"u{number.itemsize}")[0])
