"""Submissions whose results are in place, completed some at a time."""

from __future__ import annotations

import time

from ringreduce.engine.submission import Submission

INTERVAL_S = 2e-3
"""Whoever waits is woken so often at most: woken after every slot, it would take the core from what it waits for."""


class Completions:
    """One process set's. `flush` must be called before the process set waits for another rank, or has nothing to do."""

    def __init__(self) -> None:
        self._submissions: list[Submission] = []
        self._flushed_s = 0.0

    def settle(self, submission: Submission) -> None:
        """One piece of a submission is finished, or its planning is; it is completed after the last, perhaps later."""
        submission.missing_pieces -= 1
        if submission.missing_pieces:
            return
        self._submissions.append(submission)
        if time.monotonic() - self._flushed_s > INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Complete them now."""
        submissions, self._submissions = self._submissions, []
        for submission in submissions:
            submission.complete()
        self._flushed_s = time.monotonic()
