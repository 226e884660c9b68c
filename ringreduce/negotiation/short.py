"""Short all-reduces whose elements travel with the news that they are ready, so that no messages of their own follow.

A loss, a norm, a metric: a thread waits, and a host's share is its ranks' few elements. Sent as ever, they would cost
the hops of the negotiation, and then those of the data. Here a rank leaves its elements beside its counters, where its
leader finds them; a leader's report of one id carries the sum of its subtree's; and the schedule's entry brings back
what the root has made of all, to the leaders by a message, to their groups' ranks in the schedule's memory.

What holds: a sum is made of the very submissions that the report counts, or there is none. So where anything is odd,
the sum is dropped, which costs time only; the elements themselves do not change before the entry is read:

    two ids in a report, or no thread waits for one     no sum
    a rank has submitted anything since                 its elements are gone
    a child has reported anything since                 its sum is gone, as that is of an earlier report
    a sum is missing at the root                        the entry has none, for all ranks: they run it as ever
    mismatch, join, death                               ids are forgotten, or nothing is scheduled any more
    an id that was submitted several times              no sum, so that the one pending submission is the one counted
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ringreduce.collectives.ops import Reduction
from ringreduce.execution.across import finished, sum_of
from ringreduce.execution.allreduce import travelling
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.protocol import Ready
from ringreduce.transport.counters import Held


class Short:
    """The sums of short arrays in one process set, as a leader adds them up; `elements` is what any rank calls."""

    def __init__(self, most_bytes: int, ranks: int, children: Iterable[int], is_root: bool) -> None:
        """most_bytes: the largest array that counts as short.  ranks: how many the process set has."""
        self._most_bytes, self._ranks, self._is_root = most_bytes, ranks, is_root
        self._below: dict[int, tuple[list[int], bytes] | None] = dict.fromkeys(children)

    def elements(self, submission: Submission) -> Any | None:
        """What a rank leaves for its leader, beside a counter."""
        return None if self._reduction(submission) is None else submission.inputs[0].flat

    def _reduction(self, submission: Submission) -> Reduction | None:
        submission.divisor = self._ranks  # where ranks have joined, nothing has an id
        return travelling(submission, self._most_bytes) if submission.waits else None

    def receive(self, child: int, message: Ready) -> None:
        """Take a report of a group below."""
        self._below[child] = (message.ids, message.partial) if message.partial else None

    def partial(self, ids: list[int], counted: Sequence[Submission], times: int, group: Sequence[Held] = ()) -> bytes:
        """The sum of this subtree's elements of `ids`, which have just become ready here; empty where there is none.

        The root's are the finished elements.
        counted: this rank's submissions of the first id that are not scheduled.
        times:   how often that was ready here;  group: the other ranks'.
        """
        below, self._below = list(self._below.values()), dict.fromkeys(self._below)
        if len(ids) != 1 or len(counted) != 1 or not all(each is not None and each[0] == ids for each in below):
            return b""
        (own,) = counted
        reduction = self._reduction(own)
        if reduction is None:
            return b""
        flat = own.inputs[0].flat
        parts = [flat, *(each.elements(ids[0], times, flat) for each in group)]
        if any(each is None for each in parts):
            return b""
        partial = sum_of(parts, reduction)
        if below:
            reduction.combine(partial, *[np.frombuffer(each[1], reduction.sum_type) for each in below if each])
        result: bytes = (finished(partial, reduction) if self._is_root else partial).tobytes()
        return result
