"""An engine runs, leaves, or has failed; and process sets and channels end before it, or with it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

from ringreduce.execution import errors_for
from ringreduce.execution.executor import Running
from ringreduce.transport.world import World


class Ending:
    """One engine's. Any thread may look at it.

    It changes with the inbox's lock held, so that what a thread submits meanwhile is announced, or refused.
    """

    def __init__(self, world: World, lock: threading.Lock) -> None:
        self.leaving = ""  # not empty: why this rank leaves
        self.leaving_s = math.inf  # since when, for the stall watch
        self.error: Exception | None = None  # why the engine has failed; it runs nothing any more
        self._world, self._lock = world, lock

    def close(self, on: Running, closed: str, leaver: int) -> None:
        """Close a process set, whose pending submissions fail, or a channel, where running ones fail too."""
        with self._lock:
            if not on.closed:
                on.closed, on.leaver = closed, leaver
            lost = on.close()
        for submission in lost:
            submission.fail(errors_for.never_complete(on, submission, self._world, self.leaving))

    def stop(self, error: Exception, everything: Iterable[Running]) -> None:
        """The engine has failed: fail all pending and running submissions."""
        with self._lock:
            self.error = error
            lost = [submission for on in everything for submission in on.abandon()]
        for submission in lost:
            submission.fail(error)
