"""The all-reduce of elements that travel in 8 or 4 bits, in two hops: each is rounded twice, however many the ranks.

With P = 3, the columns being the chunks, `a1` the blocks in which rank 1 sends its elements of chunk a:

            rank 0            rank 1            rank 2
          a0  b0  c0        a1  b1  c1        a2  b2  c2     encode: each rank its elements, by kernels/quantized.py
          a0 a1 a2          b0 b1 b2          c0 c1 c2       gather, decode, sum in float32, encode
          A                     B                     C
          A   B   C         A   B   C         A   B   C      spread; all decode the same bits

These are the steps of the direct all-reduce (direct.py), of arrays whose elements are blocks. Around a ring P - 1
partial sums would be rounded.

Source: the fp8 all-reduce of torchft.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ringreduce.collectives import direct, ring
from ringreduce.collectives.ops import Reduction, Sum
from ringreduce.compression import Quantized
from ringreduce.kernels import quantized
from ringreduce.transport.base import Steps, Transport


def allreduce(
    flat: Any,
    transport: Transport,
    reduction: Reduction,
    segment_bytes: int = direct.SEGMENT_BYTES,
    workspace: ring.Workspace | None = None,
) -> Steps[None]:
    """Reduce over all ranks into `flat`, as `ring.allreduce`; every rank gets the same bits.

    reduction: with a `wire`. Elements 0 to 255 are a block, and so on.
    Cost:      as that of `direct`, for elements of 8 or 4 bits and a little more. Memory: also the blocks of `flat`.
    """
    wire = reduction.wire
    if wire is None:
        raise AssertionError("elements that travel as they are need no blocks")
    partial = reduction.start(flat) if workspace is None else workspace.partial
    blocks = wire.blocks(partial.size)
    own, of_sums = (_key(*reduction.seed, transport.rank, hop) if wire.is_stochastic else None for hop in range(2))
    quantized.encode(wire.bits, partial, blocks, own)
    yield from direct.allreduce(blocks, transport, _OfBlocks(reduction, wire, of_sums), segment_bytes)
    quantized.decode(wire.bits, blocks, partial)
    reduction._replace(op=Sum, postscale=1.0).finish(partial, flat)


class _OfBlocks:
    """What direct.py needs of a reduction, for blocks."""

    def __init__(self, reduction: Reduction, wire: Quantized, key: int | None) -> None:
        self._reduction, self._wire, self._key = reduction, wire, key

    def reduce_parts(self, parts: Sequence[Any], out: Any) -> None:
        """See `direct.Reduces`."""
        scales = self._reduction.divisor, self._reduction.postscale
        quantized.reduce(self._wire.bits, parts, out, *scales, self._key)
        if self._key is not None:
            self._key = (self._key + len(out)) % 2**32


def _key(*numbers: int) -> int:
    """A key of stochastic rounding, different on each rank and for each hop."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest(), "little")
