"""What the ranks of one host have submitted, and what runs next, in memory that they share: no messages inside a host.

Each member of a group, the ranks of a process set on one host, owns a block; only it writes there, and all read:

    words     TOTAL submissions, SCHEDULE words READ, the last response APPLIED; of the leader: the schedule's END; of
              others: which submission's elements are HELD where a leader has its schedule (negotiation/short.py)
    log       the ids of the last submissions, each with its number: what the leader looks at, unless that is many
    schedule  the leader's, a ring of words: | 3 | id | id | id | 0 | 1 | id |   a batch of 3, a response, a batch of 1
              | -6 | id | element | s |   a batch of 1, with 6 bytes of its finished elements
    counters  one a cache id: how often this member has submitted that tensor, modulo 2**32

A member first counts and logs, then raises its TOTAL, with a fence between; the leader (leader.py) first looks at the
totals, then at the log and the counters. The log is a hint, where to look: a number that is not the expected one says
that it was overwritten. The leader writes an entry, then END; the others read END first. It overwrites what all have
READ only. Its own rank needs no ring, and a group of one has none. The compiled module does the same for one operation
(engine/express.py), so no word is kept elsewhere, too.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

TOTAL, READ, APPLIED, END, HELD = 0, 1, 2, 8, 9  # END is on a cache line of its own
WORDS = 16
LOG = 16  # ids in a member's log
RING = 4096  # words of the schedule, and room for HELD elements: more than cost_model.SHORT_BYTES
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
        self.block = block
        # a memoryview's items are read ten times faster than an array's
        self.words = memoryview(block[:log].view(np.int64))
        self.log = memoryview(block[log:schedule].view(np.int64))
        self.schedule = memoryview(block[schedule:counters].view(np.int32))
        self.held = block[schedule:counters]
        self.counters = block[counters : counters + 4 * capacity].view(np.uint32)


Entry = tuple[list[int], bytes]
"""Of the schedule: the ids of a batch, none for a response; the finished elements of the only id."""


def _held(number: int, times: int) -> int:
    """The submission of an id that makes its counter `times`, as one word that is not 0."""
    return (times & NUMBERS) << 32 | number + 1


class Held:
    """Elements beside a member's counters, as its leader sees them."""

    def __init__(self, block: GroupBlock, fence: Callable[[], None]) -> None:
        self._words, self._held, self._fence = block.words, block.held, fence

    def elements(self, number: int, times: int, like: Any) -> Any | None:
        """A copy of those of the submission that made the counter of id `number` `times`, if they are there."""
        expected = _held(number, times)
        if self._words[HELD] != expected:
            return None
        self._fence()
        elements = self._held[: like.nbytes].copy().view(like.dtype)
        self._fence()
        return elements if self._words[HELD] == expected else None  # else they were overwritten meanwhile


class Counters:
    """A member's own part: it counts what it submits, and follows the schedule, unless it leads."""

    def __init__(self, blocks: Sequence[GroupBlock], member: int, fence: Callable[[], None]) -> None:
        """blocks: of all members, the leader's first;  member: this one's index."""
        self._words, self._log = blocks[member].words, blocks[member].log
        self._counters = memoryview(blocks[member].counters)
        self._schedule = blocks[0].schedule
        self._end = blocks[0].words[END:]
        self._fence = fence
        self._held = blocks[member].held if member else None

    def submit(self, ids: Sequence[int], elements: Any | None = None) -> None:
        """Count these submissions.  elements: of the only one, for the leader; of any type."""
        counters, before = self._counters, self._words[TOTAL]
        if self._held is not None:
            self._hold(ids, elements)
        for each in ids:
            counters[each] = (counters[each] + 1) & WRAP
        if len(ids) <= LOG:
            for number, each in enumerate(ids, before):  # in one word, so that it is written at once
                self._log[number % LOG] = (number & NUMBERS) << 32 | each
        self._fence()
        self._words[TOTAL] = before + len(ids)

    def _hold(self, ids: Sequence[int], elements: Any | None) -> None:
        words = self._words
        if words[HELD]:
            words[HELD] = 0
            self._fence()
        if elements is not None and self._held is not None:
            self._held[: elements.nbytes] = elements.view(np.uint8)
            self._fence()
            words[HELD] = _held(ids[0], self._counters[ids[0]] + 1)

    def withdraw(self, number: int, times: int) -> None:
        """Take back submissions of a forgotten id: then all members' counters of it are equal."""
        self._counters[number] = (self._counters[number] - times) & WRAP

    def applied(self, response: int) -> None:
        """This member has applied a response, and withdrawn what that has forgotten."""
        self._fence()
        self._words[APPLIED] = response

    def read(self) -> Entry | None:
        """The next entry of the schedule; None when there is none."""
        position = self._words[READ]
        if self._end[0] == position:
            return None
        self._fence()
        length, elements = self._schedule[position % RING], b""
        if length < 0:
            ids = self._take(position + 1, 1)
            nbytes, length = -length, 1 + -(length // 4)
            elements = array("i", self._take(position + 2, length - 1)).tobytes()[:nbytes]
        else:
            ids = self._take(position + 1, length)
        self._fence()
        self._words[READ] = position + 1 + length
        return ids, elements

    def _take(self, low: int, length: int) -> list[int]:
        """Words of the schedule from position `low` on."""
        schedule, low = self._schedule, low % RING
        words: list[int] = schedule[low : low + length].tolist()
        return words + schedule[: length - len(words)].tolist()  # from the ring's beginning


class Schedule:
    """The leader's entries: a queue for itself, and the ring for the others.

    Those for which the ring has no room wait until the slowest member has read on.
    """

    def __init__(self, blocks: Sequence[GroupBlock], fence: Callable[[], None]) -> None:
        self._others = [each.words for each in blocks[1:]]
        self._words, self._ring = blocks[0].words, blocks[0].schedule
        self._fence = fence
        self.own: deque[Entry] = deque()
        self.waiting: deque[Entry] = deque()  # for room in the ring

    def append(self, entry: list[int], elements: bytes = b"") -> None:
        """Append a batch, or a response (no ids), and write what there is room for.  elements: see `Entry`."""
        for low in range(0, max(len(entry), 1), MOST_IDS):
            part = entry[low : low + MOST_IDS], elements
            self.own.append(part)
            if self._others:
                self.waiting.append(part)
        if self.waiting:
            self.flush()

    def read(self) -> Entry | None:
        """See `Counters.read`; the leader's own."""
        return self.own.popleft() if self.own else None

    def flush(self) -> None:
        """Write waiting entries, of which there are some."""
        before = at = self._words[END]
        end = min([words[READ] for words in self._others]) + RING
        self._fence()
        while self.waiting:
            ids, elements = self.waiting[0]
            words, low = array("i", (-len(elements) or len(ids), *ids)), at % RING
            words.frombytes(elements + bytes(-len(elements) % 4))
            if at + len(words) > end:
                break
            self.waiting.popleft()
            room = RING - low
            if len(words) <= room:
                self._ring[low : low + len(words)] = words
            else:
                self._ring[low:], self._ring[: len(words) - room] = words[:room], words[room:]
            at += len(words)
        if at != before:
            self._fence()
            self._words[END] = at
