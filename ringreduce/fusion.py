"""Many tensors, few messages: the plan of which elements travel together, and packing and unpacking them.

    tensors    |w1|b1|   w2   |b2|               w3               |b3|        (of one element type, op and device)
    plan       |w1|b1|   w2   |b2|b3|   |     w3    |     w3    |  w3  |
                packed, one message        a long tensor streams through in pieces
    stream     |w1|b1|   w2   |b2|w|    |      w3        |    |      w3      |b3|

For messages (`plan`) tensors are kept whole where they fit into a slot: what is alone in one need not be packed. In
shared memory (`stream`) everything is packed, so slots are filled; a GPU's pieces (`aligned`) begin where it can read
many bytes at once. All depend on the tensors' lengths and order only, so all ranks make the same plan.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce import buffers
from ringreduce.buffers import Buffer


class Piece(NamedTuple):
    """Some elements of one tensor."""

    tensor: int
    """Its number."""
    low: int
    high: int


class Slot(NamedTuple):
    """Pieces that travel together, in the order in which they lie in the slot."""

    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """Elements of all together."""
        return sum(piece.high - piece.low for piece in self.pieces)


def plan(counts: Sequence[int], capacity: int) -> list[Slot]:
    """Which pieces of tensors of `counts` elements share a slot of at most `capacity` elements.

    A tensor of `capacity` elements or more is cut, and each of its pieces is alone. Empty tensors are in no slot.

    >>> [[piece.tensor for piece in slot.pieces] for slot in plan([3, 9, 4, 2], capacity=8)]
    [[0, 2], [1], [1], [3]]
    """
    slots: list[list[Piece]] = []
    filled: list[int] = []
    open_slot: int | None = None
    for number, count in enumerate(counts):
        if count >= capacity:
            for low in range(0, count, capacity):
                slots.append([Piece(number, low, min(low + capacity, count))])
                filled.append(slots[-1][0].high - low)
        elif count > 0:
            if open_slot is None or filled[open_slot] + count > capacity:
                open_slot = len(slots)
                slots.append([])
                filled.append(0)
            slots[open_slot].append(Piece(number, 0, count))
            filled[open_slot] += count
    return [Slot(tuple(pieces)) for pieces in slots]


@functools.lru_cache(maxsize=256)
def stream(counts: tuple[int, ...], capacity: int) -> list[Slot]:
    """Which pieces of tensors share a slot, where packing costs nothing extra: all slots but the last are full.

    >>> [[tuple(piece) for piece in slot.pieces] for slot in stream((3, 9, 2), capacity=8)]
    [[(0, 0, 3), (1, 0, 5)], [(1, 5, 9), (2, 0, 2)]]
    """
    slots: list[list[Piece]] = []
    room = 0
    for number, count in enumerate(counts):
        low = 0
        while low < count:
            if room == 0:
                slots.append([])
                room = capacity
            high = min(count, low + room)
            slots[-1].append(Piece(number, low, high))
            room -= high - low
            low = high
    return [Slot(tuple(pieces)) for pieces in slots]


class AlignedSlot(NamedTuple):
    """Pieces that travel together, and where they lie in the slot; between them there may be gaps."""

    pieces: tuple[Piece, ...]
    starts: tuple[int, ...]
    """The element of the slot at which each piece begins."""
    length: int
    """Elements of all together, gaps too."""


@functools.lru_cache(maxsize=256)
def aligned(counts: tuple[int, ...], capacity: int, alignment: int) -> list[AlignedSlot]:
    """As `stream`, but pieces begin at multiples of `alignment` elements, in the slot and in a tensor that is cut.

    capacity: elements, a multiple of `alignment`; so is each slot's length.

    >>> [(slot.starts, slot.length, *map(tuple, slot.pieces)) for slot in aligned((3, 9, 2), capacity=8, alignment=4)]
    [((0, 4), 8, (0, 0, 3), (1, 0, 4)), ((0,), 8, (1, 4, 9)), ((0,), 4, (2, 0, 2))]
    """
    slots: list[AlignedSlot] = []
    pieces: list[Piece] = []
    starts: list[int] = []
    length = 0

    def close() -> None:
        nonlocal length
        slots.append(AlignedSlot(tuple(pieces), tuple(starts), length))
        pieces.clear()
        starts.clear()
        length = 0

    for number, count in enumerate(counts):
        low = 0
        while low < count:
            if length == capacity:
                close()
            high = min(count, low + capacity - length)
            pieces.append(Piece(number, low, high))
            starts.append(length)
            length += -(-(high - low) // alignment) * alignment
            low = high
    if pieces:
        close()
    return slots


def pack(slot: Slot, inputs: Sequence[Buffer], packed: Any, widen: Callable[[Any], Any] | None = None) -> None:
    """Copy the slot's elements into `packed`; `widen` makes them of its type, when that is another."""
    start = 0
    for number, low, high in slot.pieces:
        source = inputs[number].flat[low:high]
        packed[start : start + high - low] = source if widen is None else widen(source)
        start += high - low


def unpack(slot: Slot, packed: Any, outputs: Sequence[Buffer]) -> None:
    """Copy a slot's finished elements into the outputs."""
    start = 0
    for number, low, high in slot.pieces:
        outputs[number].flat[low:high] = packed[start : start + high - low]
        start += high - low


class Memory:
    """The fusion buffer: blocks of one size in one persistent allocation for the host, and one for each GPU.

    More than it has may be asked for, when operations of several process sets overlap: what is missing is made for that
    use only, since waiting for a block that another rank holds up could last for ever.
    """

    def __init__(self, total_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.total_bytes = total_bytes
        self._own: dict[str, list[Any]] = {}
        """By device: the blocks of the one allocation, all of them; ..."""
        self._free: dict[str, list[Any]] = {}
        """... and those that nobody uses."""

    def take(self, like: Buffer) -> Any:
        """A block of bytes where `like` lies: 1-D uint8 of at least `block_bytes`."""
        if like.device not in self._own:
            everything = buffers.empty_like(like.flat, self.total_bytes, np.dtype(np.uint8))
            starts = range(0, self.total_bytes - self.block_bytes + 1, self.block_bytes)
            self._own[like.device] = [everything[start : start + self.block_bytes] for start in starts]
            self._free[like.device] = list(self._own[like.device])
        free = self._free[like.device]
        return free.pop() if free else buffers.empty_like(like.flat, self.block_bytes, np.dtype(np.uint8))

    @contextlib.contextmanager
    def block(self, like: Buffer) -> Iterator[Any]:
        """A block for as long as the context lasts; see `take`."""
        taken = self.take(like)
        yield taken
        self.give(taken, like)

    def give(self, block: Any, like: Buffer) -> None:
        """Give a block back; one that was made for the moment is forgotten."""
        if any(block is each for each in self._own[like.device]):
            self._free[like.device].append(block)
