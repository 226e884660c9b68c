"""16-bit floats to float32 and back with numba: sums of several arrays in one pass over memory.

Imported and compiled by a thread from the first reduction of 16-bit floats on, where numba is installed, which keeps
the kernels in its cache on disk. None holds the GIL.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.kernels.half_numpy import Kernels, blocks, scratch, sum_by, writable
from ringreduce.kernels.jit import compiled, extending, ir, numba

_features = importlib.import_module("llvmlite.binding").get_host_cpu_features()
if platform.machine() not in ("aarch64", "arm64") and not _features.get("f16c"):
    raise ImportError("LLVM would abort: this processor does not convert float16")

# Compiled code distinguishes the two types by the type of their bits: int16 for float16, uint16 for bfloat16.


@extending.intrinsic  # type: ignore[untyped-decorator]
def _float32(typing: Any, bits: Any) -> Any:
    """The value of 16 bits."""
    build = _from_float16 if bits == numba.int16 else _from_bfloat16
    return numba.float32(bits), lambda context, builder, signature, arguments: build(builder, arguments[0])


@extending.intrinsic  # type: ignore[untyped-decorator]
def _rounded(typing: Any, value: Any, like: Any) -> Any:
    """A float32 rounded to 16 bits, of the type of `like`."""
    build = _to_float16 if like == numba.int16 else _to_bfloat16
    return like(numba.float32, like), lambda context, builder, signature, arguments: build(builder, arguments[0])


def _from_float16(builder: Any, bits: Any) -> Any:
    return builder.fpext(builder.bitcast(bits, ir.HalfType()), ir.FloatType())


def _to_float16(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, ir.HalfType()), ir.IntType(16))


def _from_bfloat16(builder: Any, bits: Any) -> Any:
    word = ir.IntType(32)
    return builder.bitcast(builder.shl(builder.zext(bits, word), word(16)), ir.FloatType())


def _to_bfloat16(builder: Any, value: Any) -> Any:
    word = ir.IntType(32)
    bits = builder.bitcast(value, word)
    is_odd = builder.and_(builder.lshr(bits, word(16)), word(1))
    rounded = builder.add(builder.add(bits, is_odd), word(0x7FFF))
    is_nan = builder.fcmp_unordered("uno", value, value)  # rounding could carry a NaN's payload into infinity
    return builder.trunc(builder.lshr(builder.select(is_nan, word(0x7FC00000), rounded), word(16)), ir.IntType(16))


@compiled
def _widen(source: Any, target: Any) -> None:
    for i in range(len(target)):
        target[i] = _float32(source[i])


@compiled
def _narrow(values: Any, target: Any) -> None:
    for i in range(len(target)):
        target[i] = _rounded(values[i], target[i])


@compiled
def _add(source: Any, total: Any) -> None:
    for i in range(len(total)):
        total[i] += _float32(source[i])


@compiled
def _add_and_round(first: Any, second: Any, divisor: Any, reciprocal: Any, out: Any) -> None:
    for i in range(len(out)):
        total = _float32(first[i]) + _float32(second[i])
        out[i] = _rounded(total * reciprocal if reciprocal != 0 else total / divisor, out[i])


def _kernels(bits_type: type[np.signedinteger[Any]] | type[np.unsignedinteger[Any]]) -> Kernels:
    def bits(array: Any) -> Any:
        return writable(array).view(bits_type)

    def widen(source: Any, target: Any) -> None:
        _widen(bits(source), target)

    def narrow(values: Any, target: Any) -> None:
        _narrow(writable(values), bits(target))

    def add(source: Any, total: Any) -> None:
        _add(bits(source), total)

    sum_widened = sum_by(widen, narrow, add)

    def sum_parts(parts: Sequence[Any], out: Any, divisor: Any, reciprocal: Any) -> None:
        if len(parts) != 2:
            sum_widened(parts, out, divisor, reciprocal)
            return
        overlaps = any(np.may_share_memory(out, part) for part in parts)
        aside = scratch.other.view(bits_type)
        for target, first, second in blocks(bits(out), *map(bits, parts)):
            # LLVM does not vectorise the loop where the output may overlap an input
            into = aside[: len(target)] if overlaps else target
            _add_and_round(first, second, divisor, reciprocal, into)
            if overlaps:
                target[...] = into

    return Kernels(widen, narrow, sum_parts)


KERNELS = {"float16": _kernels(np.int16), "bfloat16": _kernels(np.uint16)}


def compile_kernels() -> None:
    """Compile for both types: two parts are summed by one kernel, three by the others."""
    one, out = np.float32(1), np.zeros(8, np.uint16)
    for kernels in KERNELS.values():
        for count in 2, 3:
            kernels.sum_parts([np.zeros(8, np.uint16)] * count, out, one, one)
