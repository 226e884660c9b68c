"""n elements over P ranks, and the ring's schedule: pure functions, no memory and no messages.

chunk    the part of a buffer that one rank owns: `bounds[k]` to `bounds[k + 1]`, one chunk per rank
segment  a piece of a chunk in flight; many per chunk
step     a chunk that a rank sends, and one that it receives at the same time
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple


class Step(NamedTuple):
    """One step of one rank: the chunk sent to the right, the chunk received from the left."""

    send: int
    receive: int
    reduce: bool  # True: the received elements are added to the chunk; False: they replace it


def chunk_bounds(count: int, size: int) -> list[int]:
    """Cut `count` elements into `size` chunks; the first `count % size` chunks are one element longer.

    Returns: size + 1 offsets; chunk k is bounds[k]:bounds[k + 1], and is empty where count < size.

    >>> chunk_bounds(10, 4)
    [0, 3, 6, 8, 10]
    """
    share, extra = divmod(count, size)
    return [k * share + min(k, extra) for k in range(size + 1)]


def equal_chunk(length: int, size: int, alignment: int) -> int:
    """Elements of each of `size` chunks of a slot, a multiple of `alignment`; the last ones may be shorter, or empty.

    >>> equal_chunk(100, 3, 8)  # 0:40, 40:80, 80:100
    40
    """
    return max(1, -(-length // (size * alignment))) * alignment


def bounds_of(counts: Sequence[int]) -> list[int]:
    """The offsets of chunks of the given lengths.

    >>> bounds_of([3, 0, 2])
    [0, 3, 3, 5]
    """
    return list(itertools.accumulate(counts, initial=0))


def cut_together(counts: Sequence[int], size: int) -> list[list[int]]:
    """Where each of several arrays is cut when all, one after the other, are cut into `size` chunks; see `by_chunk`.

    >>> cut_together([3, 4], 2)  # of 7 elements the first 4 are rank 0's
    [[0, 3, 3], [0, 1, 4]]
    """
    ends = chunk_bounds(sum(counts), size)
    starts = bounds_of(counts)
    return [[min(max(end - start, 0), count) for end in ends] for start, count in zip(starts, counts, strict=False)]


def scatter_reduce_steps(size: int, owned: int) -> list[Step]:
    """The size - 1 steps after which a rank owns the finished chunk `owned`; in the ring proper that is rank + 1.

    At step i a rank sends chunk owned - 1 - i and adds what it receives to chunk owned - 2 - i (mod size).
    """
    return [Step((owned - 1 - i) % size, (owned - 2 - i) % size, True) for i in range(size - 1)]


def allgather_steps(size: int, owned: int) -> list[Step]:
    """The size - 1 steps that spread every rank's chunk `owned` to all; after a scatter-reduce owned = rank + 1.

    At step i rank r sends chunk owned - i, received one step before, and receives chunk owned - i - 1 (mod size).
    """
    return [Step((owned - i) % size, (owned - i - 1) % size, False) for i in range(size - 1)]


def halvings(size: int) -> list[tuple[int, int]]:
    """The steps of collectives/halving: how many chunks a rank holds, and how many it keeps.

    >>> halvings(5)
    [(5, 3), (3, 2), (2, 1)]
    """
    held, steps = size, []
    while held > 1:
        steps.append((held, -(-held // 2)))
        held = steps[-1][1]
    return steps


def segments(low: int, high: int, length: int) -> list[tuple[int, int]]:
    """Cut low:high into pieces of at most `length` elements.

    >>> segments(3, 10, 4)
    [(3, 7), (7, 10)]
    """
    return [(start, min(start + length, high)) for start in range(low, high, length)]


def by_chunk(arrays: Sequence[Any], bounds: Sequence[Sequence[int]], size: int) -> list[list[Any]]:
    """The chunks of several arrays, by owner, of which there are `size`; array k is cut at bounds[k].

    >>> by_chunk(["abc", "de"], [[0, 2, 3], [0, 1, 2]], 2)
    [['ab', 'd'], ['c', 'e']]
    """
    return [[array[at[r] : at[r + 1]] for array, at in zip(arrays, bounds, strict=True)] for r in range(size)]
