"""Starting and stopping the timeline, from the user's threads; on rank 0."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ringreduce import errors
from ringreduce.engine.inbox import Inbox
from ringreduce.execution.timeline import Event, TimelineFile
from ringreduce.monitor.recording import Recording
from ringreduce.negotiation.ending import Ending

ANSWERS_S = 5.0  # how long rank 0 waits for the others


class TimelineControl:
    """ended: set when the engine's thread has ended;  clock_offsets_us: by rank, as for TimelineFile."""

    def __init__(
        self,
        inbox: Inbox,
        recording: Recording,
        ending: Ending,
        ended: threading.Event,
        clock_offsets_us: Sequence[float],
    ) -> None:
        self._inbox, self._recording, self._ending = inbox, recording, ending
        self._ended, self._clock_offsets_us = ended, clock_offsets_us

    def start(self, path: str, mark_cycles: bool, first: Sequence[Event] = ()) -> None:
        """Start recording; stops an earlier timeline. Returns when all ranks record, or after ANSWERS_S.

        Raises OSError for a bad `path`.

        first: events of this rank from before.
        """
        self.stop()
        file = TimelineFile(path, self._clock_offsets_us, min((each.start_us for each in first), default=None))
        file.add(0, first)
        answered = self._call_and_wait(lambda done: self._recording.start(file, mark_cycles, done))
        if not answered and (self._ended.is_set() or self._recording.job.failed):
            file.close()
            error = self._ending.error
            raise errors.CollectiveError(f"start_timeline: {error or 'the engine has ended'}") from error

    def stop(self) -> None:
        """Stop recording; returns when all ranks' events are in the file, or after ANSWERS_S."""
        if not self._call_and_wait(self._recording.stop):
            self._inbox.call_soon(self._recording.close)

    def _call_and_wait(self, callback: Callable[[Callable[[], None]], None]) -> bool:
        """Run `callback(done)` where the engine polls, and wait until it calls `done`; False if it does not in time."""
        done, job = threading.Event(), self._recording.job
        until_s = time.monotonic() + ANSWERS_S
        self._inbox.call_soon(lambda: job(lambda: callback(done.set)))
        while not done.wait(0.05):
            if self._ended.is_set() or job.failed or time.monotonic() > until_s:
                return False
        return True
