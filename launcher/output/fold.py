"""Finds the lines that several ranks print at about the same time, so that they can be shown once. Does no I/O.

A line waits a moment for the same line of the other ranks. A rank's own lines keep their order, over both streams:
to show a line that another rank holds too, but behind other lines, those others are shown first, even before their
time. So nothing waits longer than `wait_s`, and ranks of which one prints an extra line fold again after it.

    rank 0   epoch 1 · loss 0.3 · epoch 2              [0-1] epoch 1
    rank 1   epoch 1 · loss 0.4 · saved · epoch 2      [  0] loss 0.3
                                                       [  1] loss 0.4
                                                       [  1] saved
                                                       [0-1] epoch 2
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple, TypeAlias

FOLD_WAIT_S = 0.25
"""How long a line waits for the same line of other ranks."""

MAX_HELD_BYTES = 8 << 20
"""Of more lines than these, the oldest are shown at once: a flood does not fill memory."""

_OVERHEAD_BYTES = 200  # about what Python needs for a line in addition to its bytes

Key: TypeAlias = tuple[str, bytes]
"""The stream and the line: what must be equal to be shown once."""


class Folded(NamedTuple):
    """`line`, as `ranks` (in order) have each written it once to `stream`; the first of them at `at_s`."""

    ranks: tuple[int, ...]
    stream: str
    line: bytes
    at_s: float


class _Held(NamedTuple):
    key: Key
    at_s: float
    number: int  # in the order in which lines came


class Folder:
    """The lines that wait, of each of `ranks`. Times are seconds on any one clock.

    Cost: for a line that is shown, O(ranks that hold it); more only where ranks print the same lines in other orders.
    """

    def __init__(self, ranks: Iterable[int], wait_s: float = FOLD_WAIT_S, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._queues: dict[int, deque[_Held]] = {rank: deque() for rank in ranks}
        self._counts: dict[Key, Counter[int]] = {}  # how often each rank holds a line
        self._by_age: list[tuple[float, int, int, Key]] = []  # a heap; what has been shown goes when it comes up
        self._numbers = count()
        self._ended: set[int] = set()
        self._wait_s = wait_s
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0

    def add(self, rank: int, stream: str, line: bytes, now_s: float) -> list[Folded]:
        """Take a line of `rank`; return what is to be shown now."""
        key = (stream, line)
        held = _Held(key, now_s, next(self._numbers))
        self._queues[rank].append(held)
        heapq.heappush(self._by_age, (now_s, held.number, rank, key))
        self._counts.setdefault(key, Counter())[rank] += 1
        self._held_bytes += len(line) + _OVERHEAD_BYTES
        shown = self._show_through(key) if self._is_held_by_all(key) else []
        while self._held_bytes > self._max_held_bytes:
            shown += self._show_through(self._oldest()[1])
        return shown

    def end(self, rank: int) -> None:
        """Wait for no more lines of `rank`; those that it has written are kept, and more may come.

        The only method that may be called at any time from any thread.
        """
        self._ended.add(rank)

    @property
    def due_s(self) -> float:
        """When the next line has waited long enough; infinity if none waits."""
        return self._oldest()[0] + self._wait_s if self._held_bytes else math.inf

    def expire(self, now_s: float) -> list[Folded]:
        """Return what is to be shown at `now_s`: the lines that have waited long enough, and those before them."""
        shown: list[Folded] = []
        while self.due_s <= now_s and self._held_bytes:
            shown += self._show_through(self._oldest()[1])
        return shown

    def flush(self) -> list[Folded]:
        """Return all lines that wait."""
        return self.expire(math.inf)

    def _is_held_by_all(self, key: Key) -> bool:
        holders, ended = self._counts[key], self._ended.copy()
        if len(holders) + len(ended) < len(self._queues):
            return False
        return all(rank in holders or rank in ended for rank in self._queues)

    def _oldest(self) -> tuple[float, Key]:
        """Return when the line that waits longest was written, and which it is; called only while one waits."""
        while True:
            at_s, number, rank, key = self._by_age[0]
            queue = self._queues[rank]
            if queue and queue[0].number <= number:
                return at_s, key
            heapq.heappop(self._by_age)

    def _show_through(self, key: Key) -> list[Folded]:
        """Show `key`, once the lines before it are shown of all ranks that hold it."""
        shown = []
        while behind := [rank for rank in self._counts[key] if self._queues[rank][0].key != key]:
            shown.append(self._show(self._next_of(behind)))
        shown.append(self._show(key))
        return shown

    def _next_of(self, ranks: Iterable[int]) -> Key:
        """Return the oldest of the first lines of `ranks`; if there is one, the oldest that none holds any deeper."""
        heads = sorted((self._queues[rank][0] for rank in ranks), key=lambda held: (held.at_s, held.number))
        free = (held.key for held in heads if all(self._queues[r][0].key == held.key for r in self._counts[held.key]))
        return next(free, heads[0].key)

    def _show(self, key: Key) -> Folded:
        """Take `key` from all ranks whose first line it is."""
        ranks = sorted(rank for rank in self._counts[key] if self._queues[rank][0].key == key)
        at_s = min(self._take(rank).at_s for rank in ranks)
        stream, line = key
        return Folded(tuple(ranks), stream, line, at_s)

    def _take(self, rank: int) -> _Held:
        held = self._queues[rank].popleft()
        counts = self._counts[held.key]
        counts[rank] -= 1
        if not counts[rank]:
            del counts[rank]
        if not counts:
            del self._counts[held.key]
        self._held_bytes -= len(held.key[1]) + _OVERHEAD_BYTES
        return held
