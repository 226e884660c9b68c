"""What the leader of a group does: it finds what all ranks below it have submitted, and writes its group's schedule.

A group is the ranks of a process set that share memory: those on one host, or a single rank. Its leader is its first
rank. The groups' leaders form a tree, FAN_OUT below each; the root's is the coordinator's rank.

    up    what is ready in a whole subtree, when it becomes ready        one message a batch of tensors
    down  the schedule, decided by the root alone, so its order is one   one message a batch to each leader below

A leader sees a group below it as one more member, whose counters it keeps itself. On one host there is no message. A
tensor costs its group a counter and each message 4 bytes; with H hosts a batch takes 2 log(H) hops, whoever is late.

The coordinator's responses are messages to all ranks; an entry of the schedule fixes the place of each. A response may
forget an id. What was submitted by it and is not scheduled before the response is withdrawn, by ranks and by leaders,
when they read the response, and submitted anew as a record. When all have read it, all counters are equal again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringreduce.negotiation.protocol import Ready, Scheduled
from ringreduce.transport.counters import APPLIED, LOG, NUMBERS, TOTAL, WRAP, GroupBlock, Schedule

FAN_OUT = 4


def parent_of(group: int) -> int:
    """The group above one, which is not the root 0."""
    return (group - 1) // FAN_OUT


def children_of(group: int, groups: int) -> range:
    """The groups directly below one."""
    return range(FAN_OUT * group + 1, min(groups, FAN_OUT * group + FAN_OUT + 1))


class Leader:
    """One group's leader; messages are left to the caller."""

    def __init__(
        self,
        process_set: int,
        blocks: Sequence[GroupBlock],
        capacity: int,
        fence: Callable[[], None],
        children: Iterable[int] = (),
        is_root: bool = True,
    ) -> None:
        """blocks: of the group's members;  children: any names of the groups below, as `receive` is called with."""
        self._process_set = process_set
        self._words, self._logs = [each.words for each in blocks], [each.log for each in blocks]
        self._below = {child: np.zeros(capacity, np.uint32) for child in children}
        self._rows = [*(each.counters for each in blocks), *self._below.values()]
        self.passed = np.zeros(capacity, np.uint32)
        """How often each id was ready here: what the root has scheduled."""
        self._scheduled = self.passed if is_root else np.zeros(capacity, np.uint32)
        self._known = np.zeros(capacity, bool)
        self._high = 0  # ids from here on were never used
        self._fence = fence
        self._is_root = is_root
        self._schedule = Schedule(blocks, fence)
        self.read = self._schedule.read  # the next entry of the schedule for this rank
        self._totals = [0] * len(blocks)
        self._below_submitted: list[int] = []
        self._learned = False  # true: any id may have been submitted before this leader learned it
        self._views = [_items(each) for each in self._rows]
        self._passed_view, self._known_view = _items(self.passed), _items(self._known)
        self._withdrawn: list[int] = []
        self._applied_below = dict.fromkeys(self._below, 0)
        self._reported = self._awaited = 0  # responses: the last one reported as applied; the last that is to be
        self._closed = math.inf  # the response that closes the process set
        self._since: dict[tuple[int, int], float] = {}

    def receive(self, child: int, message: Ready) -> None:
        """News of a group below."""
        _count(self._below[child], message.ids, 1)
        _count(self._below[child], message.withdrawn, -1)
        self._applied_below[child] = message.applied
        self._below_submitted += message.ids

    def poll(self) -> list[int]:
        """The ids that have become ready in this subtree, ascending: for `schedule` at the root, else for `report`."""
        if self._schedule.waiting:
            self._schedule.flush()
        totals, before = [words[TOTAL] for words in self._words], self._totals
        if totals == before and not (self._learned or self._below_submitted):
            return []
        self._fence()
        self._totals = totals
        ids = None if self._learned else self._submitted(before, totals)
        self._learned, self._below_submitted = False, []
        return self._ready() if ids is None else self._ready_of(ids)

    def _submitted(self, before: Sequence[int], totals: Sequence[int]) -> list[int] | None:
        """The ids that were submitted meanwhile, ascending; None when they are so many that a look at all is faster."""
        if sum(totals) - sum(before) + len(self._below_submitted) > LOG:
            return None
        ids = set(self._below_submitted)
        for log, number, total in zip(self._logs, before, totals):  # noqa: B905, strict=True takes a tenth of this
            while number < total:
                word = log[number % LOG]
                if word >> 32 != number & NUMBERS:  # overwritten since
                    return None
                ids.add(word & WRAP)
                number += 1
        return sorted(ids)

    def _ready_of(self, ids: Sequence[int]) -> list[int]:
        """Of these ids, those that have become ready."""
        ready, passed, known = [], self._passed_view, self._known_view
        for each in ids:
            if known[each]:
                low = passed[each]
                times = min([(row[each] - low) & WRAP for row in self._views])
                passed[each] = (low + times) & WRAP
                ready += [each] * times
        return ready

    def _ready(self) -> list[int]:
        """Of all ids, those that have become ready."""
        high = self._high
        times = self._rows[0][:high] - self.passed[:high]  # unsigned: right beyond 2**32, too
        for row in self._rows[1:]:
            times = np.minimum(times, row[:high] - self.passed[:high])
        times *= self._known[:high]
        ready = times.nonzero()[0]
        self.passed[:high] += times
        return ready.repeat(times[ready]).tolist()  # type: ignore[no-any-return]

    def report(self, ids: list[int], partial: bytes = b"") -> Ready | None:
        """The message for the leader above; None when there is no news."""
        if self.ended or not (ids or self._withdrawn or self._reported < self._awaited <= self.applied()):
            return None
        self._reported = self.applied()
        withdrawn, self._withdrawn = self._withdrawn, []
        return Ready(self._process_set, ids, withdrawn, self._reported, partial)

    @property
    def is_idle(self) -> bool:
        """True when this rank has read all of the schedule, and there is nothing more to write."""
        return not (self._schedule.own or self._schedule.waiting)

    def times(self, number: int) -> int:
        """How often this id was ready here."""
        return self._passed_view[number]

    def schedule(self, entries: list[list[int]], reduced: bytes = b"") -> Scheduled | None:
        """Write entries that the root has decided; returns the message for the leaders below, None without any."""
        for entry in entries:
            self._schedule.append(entry, reduced)
            if not self._is_root:
                _count(self._scheduled, entry, 1)
        return Scheduled(self._process_set, entries, reduced) if self._below else None

    def change(self, response: int, forgotten: Sequence[int], learned: Sequence[int], closes: bool = False) -> None:
        """Follow a response: the root when it decides it, other leaders when they apply it."""
        if closes:
            self._closed = self._awaited = response
        if forgotten:
            forgotten = list(forgotten)  # NumPy takes a tuple for an index of several dimensions
            lost = self.passed[forgotten] - self._scheduled[forgotten]
            self._withdrawn += np.repeat(forgotten, lost).tolist()
            self.passed[forgotten] = self._scheduled[forgotten]
            self._known[forgotten] = False
            self._awaited = response
        if learned:
            self._known[list(learned)] = True
            self._high = max(self._high, max(learned) + 1)
            self._learned = True  # a faster rank may have submitted one already

    def applied(self) -> int:
        """The last response that all ranks of this subtree have applied; what they withdrew is in their counters."""
        applied = min([words[APPLIED] for words in self._words] + list(self._applied_below.values()))
        self._fence()
        return int(applied)

    @property
    def ended(self) -> bool:
        """True when all ranks of this subtree have closed the process set, and the leader above knows."""
        return (self.applied() if self._is_root else self._reported) >= self._closed

    def waiting(self, now_s: float) -> dict[int, float]:
        """The ids that some ranks here have submitted and that are not scheduled: since which of these calls."""
        if self._closed < math.inf:  # what is not scheduled never runs, and no response will forget it
            return {}
        high = self._high
        differs = np.zeros(high, bool)
        for row in self._rows:
            differs |= row[:high] != self._scheduled[:high]
        ids = (differs & self._known[:high]).nonzero()[0].tolist()
        self._since = {key: self._since.get(key, now_s) for key in ((each, int(self._scheduled[each])) for each in ids)}
        return {each: since for (each, _), since in self._since.items()}


def _items(array: Any) -> memoryview:
    """The array's items, ten times faster to read than through the array."""
    return memoryview(array)


def _count(counters: Any, ids: Sequence[int], by: int) -> None:
    """Change the counters of these ids, which may repeat. Few: `np.add.at` takes 10 us."""
    words = _items(counters)
    for each in ids:
        words[each] = (words[each] + by) & WRAP
