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

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

FOLD_WAIT_S = 0.25
"""How long a line waits for the same line of other ranks."""

MAX_HELD_BYTES = 8 << 20
"""Of more lines than these, the oldest are shown at once: a flood does not fill memory."""

_OVERHEAD_BYTES = 200  # about what Python needs for a line besides its bytes

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


class Folder:
    """The lines that wait, of each of `ranks`. Times are seconds on any one clock.

    Cost: O(ranks) for a line that is shown; more only where ranks print the same lines in different orders.
    """

    def __init__(self, ranks: Iterable[int], wait_s: float = FOLD_WAIT_S, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._queues: dict[int, deque[_Held]] = {rank: deque() for rank in ranks}
        self._counts: dict[int, Counter[Key]] = {rank: Counter() for rank in self._queues}
        self._ended = dict.fromkeys(self._queues, False)
        self._wait_s = wait_s
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0

    def add(self, rank: int, stream: str, line: bytes, now_s: float) -> list[Folded]:
        """Take a line of `rank`; return what is to be shown now."""
        key = (stream, line)
        self._queues[rank].append(_Held(key, now_s))
        self._counts[rank][key] += 1
        self._held_bytes += len(line) + _OVERHEAD_BYTES
        shown = self._show_through(key) if self._is_held_by_all(key) else []
        while self._held_bytes > self._max_held_bytes:
            shown += self._show_through(self._oldest().key)
        return shown

    def end(self, rank: int) -> None:
        """Wait for no more lines of `rank`; those that it has written are kept, and more may come.

        The only method that may be called at any time from any thread.
        """
        self._ended[rank] = True

    @property
    def due_s(self) -> float:
        """When the next line has waited long enough; infinity if none waits."""
        return self._oldest().at_s + self._wait_s if self._held_bytes else math.inf

    def expire(self, now_s: float) -> list[Folded]:
        """Return what is to be shown at `now_s`: the lines that have waited long enough, and those before them."""
        shown: list[Folded] = []
        while self.due_s <= now_s and self._held_bytes:
            shown += self._show_through(self._oldest().key)
        return shown

    def flush(self) -> list[Folded]:
        """Return all lines that wait."""
        return self.expire(math.inf)

    def _is_held_by_all(self, key: Key) -> bool:
        return all(ended or key in self._counts[rank] for rank, ended in self._ended.items())

    def _oldest(self) -> _Held:
        return min((queue[0] for queue in self._queues.values() if queue), key=lambda held: held.at_s)

    def _show_through(self, key: Key) -> list[Folded]:
        """Show `key`, once the lines before it are shown of all ranks that hold it."""
        shown = []
        while behind := [rank for rank in self._queues if self._is_deeper(key, rank)]:
            shown.append(self._show(self._next_of(behind)))
        shown.append(self._show(key))
        return shown

    def _is_deeper(self, key: Key, rank: int) -> bool:
        """Whether `rank` holds `key` behind another line."""
        return key in self._counts[rank] and self._queues[rank][0].key != key

    def _next_of(self, ranks: Iterable[int]) -> Key:
        """Return the oldest of the first lines of `ranks`; if there is one, the oldest that none holds any deeper."""
        heads = sorted((self._queues[rank][0] for rank in ranks), key=lambda held: held.at_s)
        free = (held.key for held in heads if not any(self._is_deeper(held.key, rank) for rank in self._queues))
        return next(free, heads[0].key)

    def _show(self, key: Key) -> Folded:
        """Take `key` from all ranks whose first line it is."""
        ranks = [rank for rank, queue in self._queues.items() if queue and queue[0].key == key]
        at_s = min(self._take(rank).at_s for rank in ranks)
        stream, line = key
        return Folded(tuple(sorted(ranks)), stream, line, at_s)

    def _take(self, rank: int) -> _Held:
        held = self._queues[rank].popleft()
        counts = self._counts[rank]
        counts[held.key] -= 1
        if not counts[held.key]:
            del counts[held.key]
        self._held_bytes -= len(held.key[1]) + _OVERHEAD_BYTES
        return held
