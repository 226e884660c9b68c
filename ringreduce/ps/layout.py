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


class Shard(NamedTuple):
    """Some rows of an array, or the whole of it."""

    name: str  # w, or w[10:20]
    key: str
    nbytes: int
    rows: slice | None = None

    def of(self, array: Any) -> Any:
        """A view of this shard of the array."""
        return array if self.rows is None else array[self.rows]


def shards_of(keys: Sequence[Key], servers: int) -> list[list[Shard]]:
    """The shards of each server, about the same number of bytes each.

    An array of more than a server's share is cut by rows into a shard for each; then the largest shard goes to the
    server that has the fewest bytes.

    >>> f4 = np.dtype(np.float32)
    >>> [[shard.name for shard in held] for held in shards_of([Key("w", (4, 8), f4), Key("b", (2,), f4)], 2)]
    [['w[0:2]', 'b'], ['w[2:4]']]
    """
    share = sum(key.nbytes for key in keys) / servers
    shards = [each for key in keys for each in _cut(key, servers if key.nbytes > share else 1)]
    held: list[list[Shard]] = [[] for _ in range(servers)]
    least = [(0, server) for server in range(servers)]
    for shard in sorted(shards, key=lambda each: -each.nbytes):  # stable: alike on all ranks
        has, server = heapq.heappop(least)
        held[server].append(shard)
        heapq.heappush(least, (has + shard.nbytes, server))
    return held


def _cut(key: Key, parts: int) -> list[Shard]:
    rows = key.shape[0] if key.shape else 1
    ends = sorted({rows * part // parts for part in range(parts + 1)})
    if len(ends) <= 2:
        return [Shard(key.name, key.name, key.nbytes)]
    return [
        Shard(f"{key.name}[{low}:{high}]", key.name, (high - low) * key.nbytes // rows, slice(low, high))
        for low, high in itertools.pairwise(ends)
    ]


def joined(values: Mapping[str, Any], layout: Sequence[Sequence[Shard]], keys: Sequence[Key]) -> dict[str, Any]:
    """The arrays by name, made of their shards' values."""
    shards = list(itertools.chain(*layout))
    cut = {shard.key for shard in shards if shard.rows is not None}
    arrays = {key.name: np.empty(key.shape, key.dtype) if key.name in cut else values[key.name] for key in keys}
    for shard in shards:
        if shard.rows is not None:
            arrays[shard.key][shard.rows] = values[shard.name]
    return arrays
