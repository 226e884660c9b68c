"""Many tensors, few messages: the plan of which elements travel together, and packing and unpacking them.

    tensors    |w1|b1|   w2   |b2|               w3               |b3|        (of one element type, op and device)
    plan       |w1|b1|   w2   |b2|w|    |      w3        |    |      w3      |b3|     everything is packed
    whole      |w1|b1|   w2   |b2|b3|   |     w3    |     w3    |  w3  |
                packed, one message        a long tensor streams through in pieces

In shared memory everything is packed, so slots are full. For messages, tensors that fit into a slot are kept whole: one
that is alone in a slot need not be packed. A GPU's pieces are aligned, so that it can read many bytes at once, and
those that are encoded, so that each tensor has blocks of its own. The plan depends only on the tensors' lengths and
order, so it is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ringreduce.arrays.buffer import Buffer


class Piece(NamedTuple):
    """Some elements of one tensor."""

    tensor: int  # the tensor's index
    low: int
    high: int


class Bucket(NamedTuple):
    """Pieces that travel together, and their positions in the slot; between aligned ones there may be gaps."""

    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]  # the element of the slot at which each piece begins
    length: int  # elements in the slot, gaps included


@functools.lru_cache(maxsize=256)
def plan(counts: tuple[int, ...], capacity: int, *, alignment: int = 1, whole: bool = False) -> list[Bucket]:
    """Which pieces of tensors of `counts` elements travel together, in a slot of `capacity` elements.

    alignment: pieces begin at multiples of this many elements, in the slot and in a tensor that is cut; `capacity` is a
               multiple, and so is each bucket's length.
    whole:     only tensors of `capacity` elements or more are cut, and each of their pieces is a bucket of its own.

    All buckets but the last fill their slot, unless tensors are kept whole. Empty tensors are in none.

    >>> [[tuple(piece) for piece in bucket.pieces] for bucket in plan((3, 9, 2), capacity=8)]
    [[(0, 0, 3), (1, 0, 5)], [(1, 5, 9), (2, 0, 2)]]
    >>> [[piece.tensor for piece in bucket.pieces] for bucket in plan((3, 9, 4, 2), capacity=8, whole=True)]
    [[0, 2], [1], [1], [3]]
    >>> aligned = plan((3, 9, 2), capacity=8, alignment=4)
    >>> [(bucket.starts, bucket.length, *map(tuple, bucket.pieces)) for bucket in aligned]
    [((0, 4), 8, (0, 0, 3), (1, 0, 4)), ((0,), 8, (1, 4, 9)), ((0,), 4, (2, 0, 2))]
    """
    buckets: list[list[Piece]] = []
    pieces: list[Piece] = []
    room = 0
    for number, count in enumerate(counts):
        before = pieces, room
        if whole and count > room:
            room = 0
        low = 0
        while low < count:
            if room == 0:
                pieces, room = [], capacity
                buckets.append(pieces)
            high = min(count, low + room)
            pieces.append(Piece(number, low, high))
            room -= _aligned(pieces[-1], alignment)
            low = high
        if whole and count >= capacity:
            pieces, room = before
    ends = [list(accumulate((_aligned(piece, alignment) for piece in each), initial=0)) for each in buckets]
    return [Bucket(tuple(each), tuple(at[:-1]), at[-1]) for each, at in zip(buckets, ends, strict=True)]


def _aligned(piece: Piece, alignment: int) -> int:
    """The length of a piece with the gap behind it."""
    return -((piece.low - piece.high) // alignment) * alignment


def pack(bucket: Bucket, inputs: Sequence[Buffer], packed: Any, widen: Callable[[Any], Any] | None = None) -> None:
    """Copy the bucket's elements into `packed`, and 0 into gaps; `widen` converts them to its type, if that differs."""
    for (number, low, high), start in zip(bucket.pieces, bucket.starts, strict=True):
        source = inputs[number].flat[low:high]
        packed[start : start + high - low] = source if widen is None else widen(source)
    clear_gaps(bucket, packed)


def clear_gaps(bucket: Bucket, packed: Any) -> None:
    """Write 0 into what no piece fills."""
    for (_, low, high), start, end in zip(
        bucket.pieces, bucket.starts, (*bucket.starts[1:], bucket.length), strict=True
    ):
        if start + high - low < end:
            packed[start + high - low : end] = 0


def unpack(bucket: Bucket, packed: Any, outputs: Sequence[Buffer]) -> None:
    """Copy a bucket's finished elements into the outputs."""
    for (number, low, high), start in zip(bucket.pieces, bucket.starts, strict=True):
        outputs[number].flat[low:high] = packed[start : start + high - low]


class FusionBuffer:
    """The fusion buffer: blocks of one size in one persistent allocation.

    When operations of several process sets overlap they may need more blocks than there are: those are allocated for
    that use only, since waiting for a block could be a deadlock with another rank.
    """

    def __init__(self, total_bytes: int, block_bytes: int) -> None:
        self.total_bytes, self.block_bytes = total_bytes, block_bytes
        everything = np.empty(total_bytes, np.uint8)
        starts = range(0, total_bytes - block_bytes + 1, block_bytes)
        self._free = [everything[start : start + block_bytes] for start in starts]

    @contextlib.contextmanager
    def block(self) -> Iterator[Any]:
        """A block for as long as the context lasts: 1-D uint8 of at least `block_bytes`."""
        taken = self._free.pop() if self._free else None
        yield np.empty(self.block_bytes, np.uint8) if taken is None else taken
        if taken is not None:
            self._free.append(taken)
