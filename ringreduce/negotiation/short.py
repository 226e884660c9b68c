"""Short all-reduces whose elements travel with the news that they are ready, so that no messages of their own follow.

A loss, a norm, a metric: a thread waits, and a host's share is a rank's few elements. Sent as ever, they would cost the
hops of the negotiation, and then those of the data. Here a leader's report of one id carries the sum of its subtree's
elements, and the schedule's entry brings back the root's.

What holds: a sum is made of the very submissions that the report counts, or there is none. So where anything is odd,
the sum is dropped, which costs time only; the elements themselves do not change before the entry is read:

    two ids in a report, or no thread waits for one     no sum
    a child has reported anything since                 its sum is gone, as that is of an earlier report
    a sum is missing at the root                        the entry has none, for all ranks: they run it as ever
    mismatch, join, death                               ids are forgotten, or nothing is scheduled any more
    an id that was submitted several times              no sum, so that the one pending submission is the one counted
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ringreduce.execution.allreduce import travelling
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.protocol import Ready


class Short:
    """Of one leader, the only rank of its group."""

    def __init__(self, most_bytes: int, children: Iterable[int]) -> None:
        """most_bytes: of the sums of a short one."""
        self._most_bytes = most_bytes
        self._below: dict[int, tuple[list[int], bytes] | None] = dict.fromkeys(children)

    def receive(self, child: int, message: Ready) -> None:
        """A report of a group below."""
        self._below[child] = (message.ids, message.partial) if message.partial else None

    def partial(self, ids: list[int], counted: Sequence[Submission]) -> bytes:
        """The sum of this subtree's elements of `ids`, which have just become ready here; empty where there is none.

        counted: this rank's submissions of the first id that are not scheduled.
        """
        below, self._below = list(self._below.values()), dict.fromkeys(self._below)
        if len(ids) != 1 or len(counted) != 1 or not all(each is not None and each[0] == ids for each in below):
            return b""
        (own,) = counted
        reduction = travelling(own, self._most_bytes) if own.waits else None
        if reduction is None:
            return b""
        partial: Any = reduction.start(own.inputs[0].flat.copy())
        if below:
            reduction.combine(partial, *[np.frombuffer(each[1], reduction.sum_type) for each in below if each])
        return partial.tobytes()  # type: ignore[no-any-return]
