"""Which ranks wait in ringreduce.init() for others that have not called it. Pure; times are on any one clock.

init() returns on no rank before all have called it, and MPI waits for ever without a word.
"""

import math
from collections.abc import Collection


class InitWatch:
    """The ranks of one job, as far as they say that they call init(); scripts that do not use ringreduce never do."""

    def __init__(self, size: int) -> None:
        self._absent = set(range(size))
        self.waiting: set[int] = set()
        self.inside: set[int] = set()  # those for which init() has returned, and that have not left since
        self.report_after_s = math.inf
        self.due_s = math.inf
        """When there may be something to report: ask `absent` then."""

    def wait(self, rank: int, report_after_s: float, now_s: float) -> None:
        """`rank` has called init()."""
        self.waiting.add(rank)
        self._absent.discard(rank)
        self.report_after_s = min(self.report_after_s, report_after_s)
        self.due_s = min(self.due_s, now_s + report_after_s)

    def done(self, rank: int) -> None:
        """init() has returned on `rank`."""
        self.inside.add(rank)
        self.waiting.discard(rank)
        self._absent.discard(rank)
        if not self.waiting:
            self.due_s = math.inf

    def ended(self, rank: int, now_s: float) -> None:
        """`rank` has ended. One for which others wait is worth a report, even after that of a rank that was late."""
        self.waiting.discard(rank)
        if rank in self._absent and self.waiting:
            self.due_s = min(self.due_s, now_s + self.report_after_s)

    def absent(self, ended: Collection[int]) -> tuple[set[int], set[int]]:
        """Return the ranks that others wait for: those that run, and those of `ended`; neither is due again."""
        self.due_s = math.inf
        return self._absent - set(ended), self._absent & set(ended)
