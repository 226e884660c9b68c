"""Completes submissions in groups, so that waking their waiters costs less."""

from __future__ import annotations

import time

from ringreduce.engine.submission import Submission

INTERVAL_S = 2e-3
"""Shortest time between wakeups: a waiter woken after every bucket would compete with the engine for the core."""


class Completions:
    """The finished submissions of one process set. Call `flush` before the set waits for another rank, or is idle."""

    def __init__(self) -> None:
        self._submissions: list[Submission] = []
        self._flushed_s = 0.0

    def settle(self, submission: Submission) -> None:
        """One piece of a submission, or its planning, is finished; the last one completes it, now or at a flush."""
        submission.missing_pieces -= 1
        if submission.missing_pieces:
            return
        self._submissions.append(submission)
        if time.monotonic() - self._flushed_s > INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Complete all finished submissions now."""
        submissions, self._submissions = self._submissions, []
        for submission in submissions:
            submission.complete()
        self._flushed_s = time.monotonic()
