"""The timeline of a whole job: rank 0's threads start and stop it, the other engines send it their events.

A file that cannot be written ends the recording, not the job.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

from ringreduce import errors
from ringreduce.execution.timeline import PROCESS, SENT_AT_ONCE, Event, Timeline, TimelineFile, now_us
from ringreduce.monitor.side_job import SideJob
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.protocol import TimelineEvents, TimelineStart, TimelineStop
from ringreduce.settings.log import JOB
from ringreduce.transport.waiting import WaitsFor

SEND_S = 20e-3  # interval between sends: with rank 0's polling interval, events are in the file within 100 ms
ANSWERS_S = 5.0  # how long rank 0 waits for the others


class Recording:
    """One rank's part of the recording; any thread of rank 0 may call `start` and `stop`."""

    def __init__(
        self,
        mailbox: Mailbox,
        timeline: Timeline,
        followed: Callable[[], dict[int, int]],
        has_run: Callable[[dict[int, int]], bool],
        call_soon: Callable[[Callable[[], object]], object],
        ending: Ending,
        ended: threading.Event,
        clock_offsets_us: Sequence[float],
    ) -> None:
        """followed: by process set, how many entries of its schedule this rank has followed.

        has_run:   True when this rank has run what another's `followed` counts.
        call_soon: runs a callback where the engine polls.
        ended:     set when the engine's thread has ended.
        clock_offsets_us: by rank, as for TimelineFile.
        """
        self._mailbox, self._timeline = mailbox, timeline
        self._followed, self._has_run = followed, has_run
        self._call_soon, self._ending, self._ended = call_soon, ending, ended
        self._clock_offsets_us = clock_offsets_us
        self._job = SideJob("the timeline", mailbox.rank)
        messages = (TimelineStart, TimelineStop, TimelineEvents)
        mailbox.handlers |= dict.fromkeys(messages, lambda *args: self._job(lambda: self._receive(*args)))
        self._file: TimelineFile | None = None
        self._missing: set[int] = set()
        self._done: Callable[[], object] = lambda: None
        self._until: dict[int, int] | None = None  # the recording ends when `has_run` is true of this
        self._sent_s = 0.0

    # Called by the user's threads, on rank 0

    def start(self, path: str, mark_cycles: bool, first: Sequence[Event] = ()) -> None:
        """Start recording; stops an earlier timeline. Returns when all ranks record, or after ANSWERS_S.

        first:  events of this rank from before.
        Raises: OSError for a bad `path`; an earlier timeline goes on then.
        """
        if (earlier := self._file) is not None and earlier.place == os.path.realpath(path):
            self.stop()  # two would write into one file
        file = TimelineFile(path, self._clock_offsets_us, min((each.start_us for each in first), default=None))
        file.add(0, first)
        self.stop()
        if not self._call_and_wait(lambda done: self._start(file, mark_cycles, done)) and self._has_ended():
            file.close()
            error = self._ending.error
            raise errors.CollectiveError(f"start_timeline: {error or 'the engine has ended'}") from error

    def stop(self) -> None:
        """Stop recording; returns when all ranks' events are in the file, or after ANSWERS_S."""
        if not self._call_and_wait(self._stop):
            self._call_soon(self.close)

    def _call_and_wait(self, callback: Callable[[Callable[[], None]], None]) -> bool:
        """Run `callback(done)` where the engine polls, and wait until it calls `done`; False if it does not in time."""
        done, until_s = threading.Event(), time.monotonic() + ANSWERS_S
        self._call_soon(lambda: self._job(lambda: callback(done.set)))
        while not done.wait(0.05):
            if self._has_ended() or time.monotonic() > until_s:
                return False
        return True

    def _has_ended(self) -> bool:
        return self._ended.is_set() or self._job.failed

    # Called by the thread that polls

    def waits_for(self) -> WaitsFor:
        """Control messages, while events may come or go."""
        busy = self._timeline.recording or self._timeline.events or self._missing
        return WaitsFor.CONTROL if busy else WaitsFor.NOTHING

    def poll(self) -> bool:
        """Send events; the last ones when rank 0 has requested them, and this rank has run what rank 0 has run.

        In shared memory rank 0 may have a sum before this rank has seen that all are ready.
        """
        if self._until is not None and self._has_run(self._until):
            self.finish()
        return self._job(self._flush)

    def finish(self) -> None:
        """Stop recording on this rank, and send the last events."""
        self._until = None
        self._timeline.stop()
        self._job(lambda: self._send(answers=True))

    def close(self) -> None:
        """Stop recording; on rank 0 write the remaining events, and close the file."""
        self._job(self._close)

    def _start(self, file: TimelineFile, mark_cycles: bool, done: Callable[[], None]) -> None:
        """After the previous recording was stopped: record to `file`, and call `done` when all ranks do."""
        self._file = file
        self._begin(mark_cycles)
        self._ask(TimelineStart(mark_cycles), done)

    def _stop(self, done: Callable[[], None]) -> None:
        """Request the last events, and call `done` when all are in the file."""
        if self._file is None:
            done()
            return

        def end() -> None:
            self._close()
            done()

        self._timeline.stop()
        self._ask(TimelineStop(self._followed()), end)

    def _begin(self, mark_cycles: bool) -> None:
        self._timeline.start(mark_cycles)
        name = f"rank {self._mailbox.rank} on {socket.gethostname()}"
        self._timeline.events.append(Event(PROCESS, name, now_us()))

    def _ask(self, request: TimelineStart | TimelineStop, done: Callable[[], object]) -> None:
        self._done, self._missing = done, set(range(1, self._mailbox.size))
        self._mailbox.send_others(request)
        if not self._missing:
            done()

    def _receive(self, rank: int, message: TimelineStart | TimelineStop | TimelineEvents) -> None:
        """Handle another rank's message."""
        if isinstance(message, TimelineStart):
            self._until = None
            self._begin(message.mark_cycles)
            self._send(answers=True)
        elif isinstance(message, TimelineStop):
            self._until = message.followed
        else:
            self._write(rank, message.events)
            if message.answers and rank in self._missing:
                self._missing.remove(rank)
                if not self._missing:
                    self._done()

    def _flush(self) -> None:
        """Send the events, at most once per `SEND_S` unless there are many."""
        count = len(self._timeline.events)
        if count >= SENT_AT_ONCE or (count and time.monotonic() - self._sent_s >= SEND_S):
            self._send(answers=False)

    def _send(self, answers: bool) -> None:
        """Send this rank's events to rank 0; rank 0 writes its own to the file."""
        events = self._timeline.take()
        self._sent_s = time.monotonic()
        if self._mailbox.rank != 0:
            self._mailbox.send(TimelineEvents(events, answers), 0)
        else:
            self._write(0, events)

    def _write(self, rank: int, events: Sequence[Event]) -> None:
        if self._file is None:
            return
        try:
            self._file.add(rank, events)
        except OSError as exc:
            JOB.warning(
                f"the timeline ends here, since {self._file.path} cannot be written: {exc.strerror}; the job continues"
            )
            self._file.close()
            self._file = None
            self._timeline.stop()
            self._mailbox.send_others(TimelineStop({}))

    def _close(self) -> None:
        self._missing = set()
        self._timeline.stop()
        if self._mailbox.rank == 0:
            self._write(0, self._timeline.take())
        if self._file is not None:
            self._file.close()
            self._file = None
