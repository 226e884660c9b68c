"""The timeline of a whole job: rank 0 starts and stops it, the other engines send it their events.

A file that cannot be written ends the recording, not the job.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from ringreduce.execution.timeline import PROCESS, SENT_AT_ONCE, Event, Timeline, TimelineFile, now_us
from ringreduce.log import JOB
from ringreduce.monitor.side_job import SideJob
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.protocol import TimelineEvents, TimelineStart, TimelineStop
from ringreduce.transport.waiting import WaitsFor

SEND_S = 20e-3  # interval between sends: with rank 0's polling interval, events are in the file within 100 ms


class Recording:
    """One rank's part of the recording."""

    def __init__(
        self,
        mailbox: Mailbox,
        timeline: Timeline,
        followed: Callable[[], dict[int, int]],
        has_run: Callable[[dict[int, int]], bool],
    ) -> None:
        """followed: by process set, how many entries of its schedule this rank has followed.

        has_run: True when this rank has run what another's `followed` counts.
        """
        self._mailbox = mailbox
        self._timeline = timeline
        self._followed, self._has_run = followed, has_run
        self.job = SideJob("the timeline", mailbox.rank)
        messages = (TimelineStart, TimelineStop, TimelineEvents)
        mailbox.handlers |= dict.fromkeys(messages, lambda *args: self.job(lambda: self._receive(*args)))
        self._file: TimelineFile | None = None
        self._missing: set[int] = set()
        self._done: Callable[[], object] = lambda: None
        self._until: dict[int, int] | None = None  # the recording ends when `has_run` is true of this
        self._sent_s = 0.0

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
        return self.job(self._flush)

    def finish(self) -> None:
        """Stop recording on this rank, and send the last events."""
        self._until = None
        self._timeline.stop()
        self.job(lambda: self._send(answers=True))

    def close(self) -> None:
        """Stop recording; on rank 0 write the remaining events, and close the file."""
        self.job(self._close)

    def start(self, file: TimelineFile, mark_cycles: bool, done: Callable[[], None]) -> None:
        """On rank 0, after the previous recording was stopped: record to `file`, and call `done` when all ranks do."""
        self._file = file
        self._begin(mark_cycles)
        self._ask(TimelineStart(mark_cycles), done)

    def stop(self, done: Callable[[], None]) -> None:
        """On rank 0: request the last events, and call `done` when all are in the file."""
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
                f"the timeline ends here, since {self._file.path} cannot be written: {exc.strerror}; the job goes on"
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
