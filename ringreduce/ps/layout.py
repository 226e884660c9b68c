"""Which server holds which part of the parameters."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Key(NamedTuple):
    """One array of the parameters."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Piece(NamedTuple):
    """Some rows of an array, or the whole of it."""

    name: str  # w, or w[10:20]
    key: str
    rows: slice | None

    def of(self, array: Any) -> Any:
        """A view of this piece of the array."""
        return array if self.rows is None else array[self.rows]


def shard(keys: Sequence[Key], servers: int) -> list[list[Piece]]:
    """The pieces of each server, about equally many bytes each.

    An array of more than a server's share is cut by rows into a piece for each; then the largest piece goes to the
    server that has the fewest bytes.

    >>> f4 = np.dtype(np.float32)
    >>> [[piece.name for piece in pieces] for pieces in shard([Key("w", (4, 8), f4), Key("b", (2,), f4)], 2)]
    [['w[0:2]', 'b'], ['w[2:4]']]
    """
    share = sum(key.nbytes for key in keys) / servers
    sized = [each for key in keys for each in (_cut(key, servers) if key.nbytes > share else [(key.nbytes, _all(key))])]
    held: list[list[Piece]] = [[] for _ in range(servers)]
    least = [(0, server) for server in range(servers)]
    for nbytes, piece in sorted(sized, key=lambda each: -each[0]):  # stable: alike on all ranks
        has, server = heapq.heappop(least)
        held[server].append(piece)
        heapq.heappush(least, (has + nbytes, server))
    return held


def _all(key: Key) -> Piece:
    return Piece(key.name, key.name, None)


def _cut(key: Key, parts: int) -> list[tuple[int, Piece]]:
    rows = key.shape[0] if key.shape else 1
    ends = sorted({rows * part // parts for part in range(parts + 1)})
    if len(ends) <= 2:
        return [(key.nbytes, _all(key))]
    each = key.nbytes // rows
    cuts = itertools.pairwise(ends)
    return [((end - at) * each, Piece(f"{key.name}[{at}:{end}]", key.name, slice(at, end))) for at, end in cuts]


def joined(pieces: Mapping[str, Any], layout: Sequence[Sequence[Piece]], keys: Sequence[Key]) -> dict[str, Any]:
    """The arrays by name, made of their pieces."""
    arrays = {key.name: None for key in keys} | {
        piece.key: pieces[piece.name] for held in layout for piece in held if piece.rows is None
    }
    for key in keys:
        if arrays[key.name] is None:
            arrays[key.name] = np.empty(key.shape, key.dtype)
    for piece in (each for held in layout for each in held if each.rows is not None):
        piece.of(arrays[piece.key])[...] = pieces[piece.name]
    return arrays
