"""Which ranks wait for others that never come. Pure; times are on any one clock.

init() returns on no rank before all have called it, and a collective on none before all have submitted it; MPI waits
for ever without a word.
"""

import math
from collections.abc import Collection, Mapping

from ..connection.wire import Answer

_ASK_S, _LONGEST_ASK_S = 1.0, 16.0


class InitWatch:
    """The ranks of one job, as far as they say that they call init(); scripts that do not use ringreduce never do."""

    def __init__(self, size: int) -> None:
        self._absent = set(range(size))
        self.waiting: set[int] = set()
        self.inside: set[int] = set()  # those for which init() has returned, and that have not left since
        self.vanished: set[int] = set()  # those that have ended with 0 in there
        self.report_after_s = math.inf
        self.due_s = math.inf
        """When there may be something to report: ask `absent` then."""
        self.ask_s = math.inf
        """When to ask all ranks what they do, and give `answer` their answers: often once one of them waits."""
        self._pause_s = _ASK_S
        self._waited: set[tuple[int, str]] = set()

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

    def ended(self, rank: int, code: int | None, now_s: float) -> None:
        """`rank` has ended. One for which others wait is worth a report, even after that of a rank that was late."""
        self.waiting.discard(rank)
        if code == 0 and rank in self.inside:
            self.ask_s = self.ask_s if self.vanished else now_s
            self.vanished.add(rank)
        if rank in self._absent and self.waiting:
            self.due_s = min(self.due_s, now_s + self.report_after_s)

    def absent(self, ended: Collection[int]) -> tuple[set[int], set[int]]:
        """Return the ranks that others wait for: those that run, and those of `ended`; neither is due again."""
        self.due_s = math.inf
        return self._absent - set(ended), self._absent & set(ended)

    def answer(self, answers: Mapping[int, Answer], now_s: float) -> set[int]:
        """Take what all ranks do after one has vanished; return those that wait for what they did when last asked."""
        waiting = {(rank, answer.doing) for rank, answer in answers.items() if answer.waits}
        still, self._waited = {rank for rank, _ in waiting & self._waited}, waiting
        self._pause_s = _ASK_S if waiting else min(2 * self._pause_s, _LONGEST_ASK_S)
        self.ask_s = now_s + self._pause_s
        return still
