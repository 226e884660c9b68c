"""What the ranks of one host have submitted, and what runs next, in memory that they share: no messages inside a host.

Each member of a group, the ranks of a process set on one host, owns a block; only it writes there, and all read:

    words     TOTAL submissions, SCHEDULE words READ, the last response APPLIED; of the leader: the schedule's END
    log       the ids of the last submissions, each with its number: what the leader looks at, unless that is many
    schedule  the leader's, a ring of words: | 3 | id | id | id | 0 | 1 | id |   a batch of 3, a response, a batch of 1
    counters  one a cache id: how often this member has submitted that tensor, modulo 2**32

A member first counts and logs, then raises its TOTAL, with a fence between; the leader (leader.py) first looks at the
totals, then at the log and the counters. The log is a hint, where to look: a number that is not the expected one says
that it was overwritten. The leader writes an entry, then END; the others read END first. It overwrites what all have
READ only. Its own rank needs no ring, and a group of one has none.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

TOTAL, READ, APPLIED, END = 0, 1, 2, 8  # END is on a cache line of its own
WORDS = 16
LOG = 16  # ids in a member's log
RING = 4096  # words of the schedule
MOST_IDS = RING // 2 - 1  # of one entry
WRAP = (1 << 32) - 1
NUMBERS = WRAP >> 1  # numbers in the log are modulo this + 1


def group_bytes(capacity: int) -> int:
    """The length of a member's block, for `capacity` cache ids: a multiple of 64."""
    return -(-(8 * (WORDS + LOG) + 4 * RING + 4 * capacity) // 64) * 64


class GroupBlock:
    """A member's block, as any member sees it."""

    def __init__(self, block: Any, capacity: int) -> None:
        """block: 1-D uint8, zero at first."""
        log, schedule = 8 * WORDS, 8 * (WORDS + LOG)
        counters = schedule + 4 * RING
        # a memoryview's items are read ten times faster than an array's
        self.words = memoryview(block[:log].view(np.int64))
        self.log = memoryview(block[log:schedule].view(np.int64))
        self.schedule = memoryview(block[schedule:counters].view(np.int32))
        self.counters = block[counters : counters + 4 * capacity].view(np.uint32)


class Counters:
    """A member's own part: it counts what it submits, and follows the schedule, unless it leads."""

    def __init__(self, blocks: Sequence[GroupBlock], member: int, fence: Callable[[], None]) -> None:
        """blocks: of all members, the leader's first;  member: this one's index."""
        self._words, self._log = blocks[member].words, blocks[member].log
        self._counters = memoryview(blocks[member].counters)
        self._schedule = blocks[0].schedule
        self._end = blocks[0].words[END:]
        self._fence = fence
        self._position = 0

    def submit(self, ids: Sequence[int]) -> None:
        """Count these submissions."""
        counters, before = self._counters, self._words[TOTAL]
        for each in ids:
            counters[each] = (counters[each] + 1) & WRAP
        if len(ids) <= LOG:
            for number, each in enumerate(ids, before):  # in one word, so that it is written at once
                self._log[number % LOG] = (number & NUMBERS) << 32 | each
        self._fence()
        self._words[TOTAL] = before + len(ids)

    def withdraw(self, number: int, times: int) -> None:
        """Take back submissions of a forgotten id: then all members' counters of it are equal."""
        self._counters[number] = (self._counters[number] - times) & WRAP

    def applied(self, response: int) -> None:
        """This member has applied a response, and withdrawn what that has forgotten."""
        self._fence()
        self._words[APPLIED] = response

    def read(self) -> list[int] | None:
        """The next entry of the schedule: the ids of a batch, none for a response; None when there is no entry."""
        if self._end[0] == self._position:
            return None
        self._fence()
        schedule, low = self._schedule, (self._position + 1) % RING
        length = schedule[self._position % RING]
        entry: list[int] = schedule[low : low + length].tolist()
        if len(entry) < length:
            entry += schedule[: length - len(entry)].tolist()  # from the ring's beginning
        self._position += 1 + length
        self._fence()
        self._words[READ] = self._position
        return entry


class Schedule:
    """The leader's entries: a queue for itself, and the ring for the others.

    Those for which the ring has no room wait until the slowest member has read on.
    """

    def __init__(self, blocks: Sequence[GroupBlock], fence: Callable[[], None]) -> None:
        self._others = [each.words for each in blocks[1:]]
        self._words, self._ring = blocks[0].words, blocks[0].schedule
        self._fence = fence
        self._end = 0
        self._own: deque[list[int]] = deque()
        self._waiting: deque[list[int]] = deque()

    def append(self, entry: list[int]) -> None:
        """Append a batch, or a response (no ids), and write what there is room for."""
        for low in range(0, max(len(entry), 1), MOST_IDS):
            part = entry[low : low + MOST_IDS]
            self._own.append(part)
            if self._others:
                self._waiting.append(part)
        self.flush()

    def read(self) -> list[int] | None:
        """See `Counters.read`; the leader's own."""
        return self._own.popleft() if self._own else None

    def flush(self) -> None:
        """Write waiting entries."""
        if not self._waiting:
            return
        before, end = self._end, min([words[READ] for words in self._others]) + RING
        self._fence()
        while self._waiting and self._end + 1 + len(self._waiting[0]) <= end:
            entry = self._waiting.popleft()
            words, low = array("i", (len(entry), *entry)), self._end % RING
            room = RING - low
            if len(words) <= room:
                self._ring[low : low + len(words)] = words
            else:
                self._ring[low:], self._ring[: len(words) - room] = words[:room], words[room:]
            self._end += len(words)
        if self._end != before:
            self._fence()
            self._words[END] = self._end
