"""What makes gradients short for the wire, and long again, on one core: bytes of float32 a second of processor time.

    python bench/codecs.py
    python bench/codecs.py --json codecs.json

Rows, in turns: `Compression.fp16` and `.bf16`, and blocks of 256 elements in 8 and 4 bits, by the compiled module and
by NumPy's passes; the factors of `PowerSGD`, of a matrix of 256 rows; NumPy's own `astype`, and a copy. Gradients are
about 1e-3, or 1e-5: that is subnormal as float16.

Columns: GB/s of encoding, of decoding, and of both, one after the other (medians of several runs); bytes on the wire of
float32's; `#wrong`: elements that come back further from what they were than the format allows, or than PowerSGD's
residual says at first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from common import Column, Report, flag, main, seconds_per_run

import ringreduce as rr
from ringreduce.arrays.buffer import numpy_buffer
from ringreduce.kernels import native, quantized
from ringreduce.optim.powersgd import Matrix

SECONDS_PER_RUN = 0.05
COLUMNS = (
    Column("codec", "codec", width=18, left=True),
    Column("by", "by", width=10, left=True),
    Column("gradients", "gradients", "", 10, ".0e"),
    Column("encode_gbs", "encode", "GB/s", 9, ".2f"),
    Column("decode_gbs", "decode", "GB/s", 9, ".2f"),
    Column("both_gbs", "both", "GB/s", 9, ".2f"),
    Column("of_float32", "of float32", "", 12, ".4f"),
    Column("wrong", "#wrong", "", 8, "d"),
)
Array = np.ndarray[Any, Any]
Action = Callable[[Array], Array]


class Codec(NamedTuple):
    """One way to send an array; each element may come back `bound(array)` from what it was."""

    encode: Action
    decode: Action
    bound: Action


def in_16_bits(encode: Action, decode: Action, precision: float, smallest: float) -> Codec:
    """Rounded to 16 bits."""
    return Codec(encode, decode, lambda array: np.abs(array) * precision + smallest)


def compression(kind: Any, precision: float, smallest: float) -> Codec:
    """One that users name."""
    wide = np.dtype(np.float32)
    return in_16_bits(lambda array: kind.compress(array)[0], lambda s: kind.decompress(s, wide), precision, smallest)


def in_blocks(bits: int, count: int, key: int | None = None) -> Codec:
    """Blocks of `bits` an element, into memory that is there."""
    blocks = np.empty(-(-count // quantized.BLOCK), f"V{quantized.block_bytes(bits)}")
    target = np.empty(count, np.float32)

    def encode(array: Array) -> Array:
        quantized.encode(bits, array, blocks, key)
        return blocks

    def decode(sent: Array) -> Array:
        quantized.decode(bits, sent, target)
        return target

    def bound(array: Array) -> Array:
        scale = np.abs(array).reshape(-1, quantized.BLOCK).max(axis=1) / (2 ** (bits - 1) - 1) * (1 + 2**-8)
        return np.repeat(scale * (0.501 if key is None else 1), quantized.BLOCK)

    return Codec(encode, decode, bound)


def in_factors(rank: int, count: int) -> Codec:
    """A matrix of 256 rows as PowerSGD's factors, of one rank; copied first, as it is changed in place."""
    shape = quantized.BLOCK, count // quantized.BLOCK
    gradient, residual = np.empty(count, np.float32), np.zeros(shape, np.float32)
    q = np.random.default_rng(0).standard_normal((rank, shape[1]), np.float32)
    under_way: list[Matrix] = []
    first = iter([True])

    def encode(array: Array) -> Array:
        np.copyto(gradient, array)
        under_way[:] = [Matrix(numpy_buffer(gradient, writable=True), residual, q)]
        under_way[0].project_back()
        return np.concatenate([under_way[0].p.ravel(), under_way[0].q.ravel()])

    def decode(_: Array) -> Array:
        under_way[0].finish(1)
        return gradient

    def bound(array: Array) -> Array:
        if next(first, False):  # later, it holds what was missing before, too
            return np.abs(residual).ravel() * 1.001 + 1e-6 * np.abs(array).max()
        return np.full(count, np.inf)

    return Codec(encode, decode, bound)


def codecs(count: int) -> dict[tuple[str, str], Codec]:
    """All rows: the codec's name, and by what."""
    ours = {
        "fp16": compression(rr.Compression.fp16, 2**-11, 2**-25),
        "bf16": compression(rr.Compression.bf16, 2**-8, 0),
        "int8": in_blocks(8, count),
        "int4": in_blocks(4, count),
        "int4, stochastic": in_blocks(4, count, key=1),
    }
    by = ["NumPy"] if native.module is None else ["compiled", "NumPy"]
    cast = in_16_bits(lambda array: array.astype(np.float16), lambda sent: sent.astype(np.float32), 2**-11, 2**-25)
    copy = Codec(np.copy, np.copy, np.zeros_like)
    return {(name, how): ours[name] for name in ours for how in by} | {
        ("PowerSGD-4", "NumPy"): in_factors(4, count),
        ("PowerSGD-8", "NumPy"): in_factors(8, count),
        ("fp16", "astype"): cast,
        ("none", "a copy"): copy,
    }


def seconds(action: Action, array: Array, limit_s: float) -> float:
    """Of a call, on average over as many as fill the time: processor time, so that another's load counts little."""
    begin, calls, took_s = time.process_time(), 0, 0.0
    while took_s < limit_s:
        action(array)
        calls, took_s = calls + 1, time.process_time() - begin
    return took_s / calls


def turn(codec: Codec, array: Array, limit_s: float) -> dict[str, Any]:
    """Encode and decode: seconds, bytes, and how many elements are wrong."""
    sent = codec.encode(array)
    wrong = int((np.abs(codec.decode(sent) - array) > codec.bound(array)).sum())
    took = [seconds(codec.encode, array, limit_s), seconds(codec.decode, sent, limit_s)]
    return {"took": took, "of_float32": sent.nbytes / array.nbytes, "wrong": wrong}


def bench(options: argparse.Namespace, report: Report) -> None:
    """Size by size of gradients."""
    module = native.module
    count = options.bytes // 4 // quantized.BLOCK * quantized.BLOCK
    rows, limit_s = codecs(count), seconds_per_run(options, SECONDS_PER_RUN)
    for gradients in (1e-3, 1e-5):
        array = (np.random.default_rng(0).standard_normal(count) * gradients).astype(np.float32)
        turns: dict[tuple[str, str], list[dict[str, Any]]] = {row: [] for row in rows}
        for _ in range(options.runs):
            for (name, by), codec in rows.items():
                native.module = None if by == "NumPy" else module
                turns[name, by].append(turn(codec, array, limit_s))
        for (name, by), found in turns.items():
            encode_s, decode_s = (statistics.median(each["took"][k] for each in found) for k in (0, 1))
            rates = {"encode_gbs": encode_s, "decode_gbs": decode_s, "both_gbs": encode_s + decode_s}
            row = {key: array.nbytes / took_s / 1e9 for key, took_s in rates.items()}
            row |= {"codec": name, "by": by, "gradients": gradients, "of_float32": found[0]["of_float32"]}
            report.add(row | {"wrong": sum(each["wrong"] for each in found)})


if __name__ == "__main__":
    if os.environ.get("OMP_NUM_THREADS") != "1":  # NumPy's BLAS takes as many cores, and reads it when it is imported
        os.environ["OMP_NUM_THREADS"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - itself
    size = flag("--bytes", 8 << 20, 1 << 18, metavar="N", help="of float32 (8 MiB)")
    main("codecs", __doc__, COLUMNS, bench, [size], runs=9, note="{bytes} B, median of {runs} runs, in turns")
