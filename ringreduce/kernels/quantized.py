"""Blocks of 256 float32 elements in 8 or 4 bits: by the compiled module where there is one, else by NumPy.

    | scale, bfloat16 | 256 signed bytes                                                               |    258 bytes
    | scale, bfloat16 | 128 bytes: element k in the lower four bits of byte k, element 128 + k above   |    130 bytes

An element is its integer times the scale: a 127th, or a 7th, of the block's largest magnitude. It comes out wrong by
half a scale at most; rounded stochastically by one scale at most, and right on average. The scale is never below
float32's smallest normal number, so elements below 6e-39 may become 0, and neither a scale nor its inverse is subnormal
or infinite. A block with NaN or infinity has the scale NaN, and comes out as NaN.

Source: a scale a block as in Dettmers et al., "8-bit optimizers via block-wise quantization", 2021; stochastic rounding
as in Alistarh et al., "QSGD", 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.kernels import half, native

BLOCK = 256  # elements
_LAYOUT = {
    8: np.dtype([("scale", np.uint16), ("codes", np.int8, BLOCK)]),
    4: np.dtype([("scale", np.uint16), ("codes", np.uint8, BLOCK // 2)]),
}
_COMPILED = {8: 12, 4: 13}  # types of native.c's sums, behind those of ops.py
_LARGEST = {8: np.float32(127), 4: np.float32(7)}
_SMALLEST_SCALE = np.float32(2.0**-126)
_ROUNDING = np.float32(1.5 * 2**23)  # plus a small number: the nearest integer, ties to even, in the lowest bits
_TOGETHER = 64  # blocks: their elements stay in a core's second-level cache from pass to pass


def block_bytes(bits: int) -> int:
    """Bytes of a block whose elements have 8 or 4 bits."""
    return _LAYOUT[bits].itemsize


def encode(bits: int, source: Any, blocks: Any, key: int | None = None) -> None:
    """Write `source` as blocks; zeros follow the last element.

    Shape:  `source` (count,) float32; `blocks` (n,) of `block_bytes(bits)` bytes each, n = count / 256, rounded up.
            Contiguous, at any address.
    key:    of 32 bits; rounds stochastically: the noise of block k follows from key + k, and from nothing else.
    """
    if native.module is not None:
        native.module.recode(source, blocks, bits, key is not None, key or 0)
        return
    rows = blocks.view(_LAYOUT[bits]).reshape(-1)
    for low in range(0, len(rows), _TOGETHER):
        some = source[low * BLOCK : (low + _TOGETHER) * BLOCK]
        if len(some) % BLOCK:
            some = np.concatenate([some, np.zeros(-len(some) % BLOCK, np.float32)])
        _encode(bits, some.reshape(-1, BLOCK), rows[low : low + _TOGETHER], key if key is None else key + low)


def decode(bits: int, blocks: Any, target: Any) -> None:
    """Write the elements of blocks into `target`, (count,) float32; shapes as for `encode`."""
    if native.module is not None:
        native.module.recode(blocks, target, bits)
        return
    rows = blocks.view(_LAYOUT[bits]).reshape(-1)
    whole = len(target) // BLOCK
    for low in range(0, whole, _TOGETHER):
        high = min(low + _TOGETHER, whole)
        _decode(bits, rows[low:high], target[low * BLOCK : high * BLOCK].reshape(-1, BLOCK))
    if whole < len(rows):
        last = np.empty((1, BLOCK), np.float32)
        _decode(bits, rows[whole:], last)
        target[whole * BLOCK :] = last[0, : len(target) - whole * BLOCK]


def reduce(bits: int, parts: Sequence[Any], out: Any, divisor: float, postscale: float, key: int | None = None) -> None:
    """Sum the elements of several ranks' blocks in float32, in this order; divide, multiply; encode the result once.

    Shape:  as `blocks` of `encode`, of one length. `out` may be one of the parts, but must not overlap one otherwise.
    Result: a block depends on the parts' blocks at its place, and on key + its number, alone.
    """
    if native.module is not None and len(parts) <= native.MOST_PARTS:
        scales = 1.0, divisor, postscale
        native.module.reduce([*parts], out, None, _COMPILED[bits], 0, *scales, key is not None, key or 0)
        return
    rows, *others = (each.view(_LAYOUT[bits]).reshape(-1) for each in (out, *parts))
    total, other = (np.empty((min(_TOGETHER, len(rows)), BLOCK), np.float32) for _ in range(2))
    for low in range(0, len(rows), _TOGETHER):
        here = slice(low, low + _TOGETHER)
        length = len(rows[here])
        _decode(bits, others[0][here], total[:length])
        with np.errstate(all="ignore"):
            for part in others[1:]:
                _decode(bits, part[here], other[:length])
                total[:length] += other[:length]
            total /= np.float32(divisor)
            total *= np.float32(postscale)
        _encode(bits, total[:length], rows[here], key if key is None else key + low)


def _encode(bits: int, values: Any, rows: Any, key: int | None) -> None:
    """As `encode`, for (n, 256) elements."""
    largest, codes = _LARGEST[bits], rows["codes"]
    with np.errstate(all="ignore"):
        magnitude = np.maximum(values.max(axis=1), -values.min(axis=1))
        magnitude[~np.isfinite(magnitude)] = np.nan
        scale = np.empty(len(rows), np.uint16)
        half.narrow("bfloat16", np.maximum(magnitude / largest, _SMALLEST_SCALE), scale)
        scaled = values * (np.float32(1) / _widened(scale))[:, None]
        if key is not None:
            scaled += _noise(key, len(rows))
            np.clip(scaled, -largest, largest, out=scaled)
        scaled += _ROUNDING
    integers = scaled.view(np.int32)
    if bits == 8:
        np.copyto(codes, integers, casting="unsafe")
    else:
        lower, upper = integers[:, : BLOCK // 2].astype(np.uint8), integers[:, BLOCK // 2 :].astype(np.uint8)
        lower &= np.uint8(15)
        upper *= np.uint8(16)  # NumPy's shift is slower
        np.bitwise_or(lower, upper, out=codes)
    codes[np.isnan(magnitude)] = 0
    rows["scale"] = scale


def _decode(bits: int, rows: Any, out: Any) -> None:
    """As `decode`, into (n, 256) elements."""
    codes = rows["codes"]
    if bits == 8:
        np.copyto(out, codes)
    else:
        np.copyto(out[:, : BLOCK // 2], (codes * np.uint8(16)).view(np.int8) >> np.int8(4))
        np.copyto(out[:, BLOCK // 2 :], codes.view(np.int8) >> np.int8(4))
    with np.errstate(all="ignore"):
        out *= _widened(rows["scale"])[:, None]


def _widened(scale: Any) -> Any:
    """bfloat16 scales as float32."""
    return np.left_shift(scale, np.uint32(16), dtype=np.uint32).view(np.float32)


def _hash(numbers: Any) -> Any:
    """A permutation of the 32-bit integers without visible order, in place. Source: C. Wellons, "lowbias32", 2018."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        numbers ^= numbers >> np.uint32(shift)
        numbers *= np.uint32(factor)
    numbers ^= numbers >> np.uint32(16)
    return numbers


def _noise(key: int, count: int) -> Any:
    """(count, 256) numbers between -1/2 and 1/2, odd multiples of 2**-17, so that integers stay what they are.

    Byte k of a block, as it is laid out for 4 bits, has one hash: its lower half is for element k, its upper half for
    element 128 + k.
    """
    seeds = _hash(np.arange(key, key + count, dtype=np.uint64).astype(np.uint32))
    hashes = _hash(seeds[:, None] + np.arange(BLOCK // 2, dtype=np.uint32))
    noise = np.empty((count, BLOCK), np.float32)
    np.copyto(noise[:, : BLOCK // 2], hashes & np.uint32(0xFFFF), casting="unsafe")
    np.copyto(noise[:, BLOCK // 2 :], hashes >> np.uint32(16), casting="unsafe")
    noise *= np.float32(2.0**-16)
    noise += np.float32(2.0**-17 - 0.5)
    return noise
