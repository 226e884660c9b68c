"""The timeline of a whole job: rank 0 starts and stops it, the other engines send it their events.

A file that cannot be written ends the recording, not the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ringreduce.log import LOGGER
from ringreduce.monitor.timeline import SENT_AT_ONCE, Event, Timeline, TimelineFile
from ringreduce.negotiation.protocol import TimelineEvents, TimelineStart, TimelineStop, encode
from ringreduce.transport.base import EngineTransport

SEND_S = 20e-3  # interval between sends: with rank 0's polling interval, events are in the file within 100 ms


class Recording:
    """One rank's part of the recording; used by the engine's thread only."""

    def __init__(self, transport: EngineTransport, timeline: Timeline) -> None:
        self._transport = transport
        self._timeline = timeline
        self._file: TimelineFile | None = None
        self._missing: set[int] = set()
        self._done: Callable[[], None] = lambda: None
        self._ending = False
        self._sent_s = 0.0

    @property
    def busy(self) -> bool:
        """True while events may come or go: the engine must poll control messages often."""
        return self._timeline.recording or bool(self._timeline.events or self._missing)

    def start(self, file: TimelineFile, mark_cycles: bool, done: Callable[[], None]) -> None:
        """On rank 0, after the previous recording was stopped: record on all ranks to `file`, and call `done`."""
        self._file = file
        self._timeline.start(mark_cycles)
        self._send_others(TimelineStart(mark_cycles))
        done()

    def stop(self, done: Callable[[], None]) -> None:
        """On rank 0: request the last events, and call `done` when all are in the file."""
        if self._file is None:
            done()
            return
        self._timeline.stop()
        self._done, self._missing = done, set(range(1, self._transport.size))
        self._send_others(TimelineStop())
        if not self._missing:
            self.close()

    def receive(self, rank: int, message: TimelineStart | TimelineStop | TimelineEvents) -> None:
        """Handle another rank's message."""
        if isinstance(message, TimelineStart):
            self._timeline.start(message.mark_cycles)
        elif isinstance(message, TimelineStop):
            self._ending = True
        else:
            self._write(rank, message.events)
            if message.last and rank in self._missing:
                self._missing.remove(rank)
                if not self._missing:
                    self.close()

    def finish_stop(self) -> None:
        """No operation is under way: send the last events if rank 0 has requested them."""
        if self._ending:
            self._ending = False
            self._timeline.stop()
            self.send(last=True)

    def flush(self) -> None:
        """Send the events, at most once per `SEND_S` unless there are many."""
        count = len(self._timeline.events)
        if count >= SENT_AT_ONCE or (count and time.monotonic() - self._sent_s >= SEND_S):
            self.send(last=False)

    def send(self, last: bool) -> None:
        """Send this rank's events to rank 0; rank 0 writes its own to the file."""
        events = self._timeline.take()
        self._sent_s = time.monotonic()
        if self._transport.rank != 0:
            self._transport.send_control(encode(TimelineEvents(events, last)), 0)
        else:
            self._write(0, events)

    def _write(self, rank: int, events: Sequence[Event]) -> None:
        if self._file is None:
            return
        try:
            self._file.add(rank, events)
        except OSError as exc:
            LOGGER.warning(
                f"the timeline ends here, since {self._file.path} cannot be written: {exc.strerror}; the job goes on"
            )
            self._file.close()
            self._file = None
            self._timeline.stop()
            self._send_others(TimelineStop())

    def close(self) -> None:
        """Stop recording; on rank 0 write the remaining events, and close the file."""
        self._missing = set()
        self._timeline.stop()
        if self._transport.rank == 0:
            self._write(0, self._timeline.take())
        if self._file is not None:
            self._file.close()
            self._file = None
        done, self._done = self._done, lambda: None
        done()

    def _send_others(self, message: TimelineStart | TimelineStop) -> None:
        """On rank 0."""
        for rank in range(1, self._transport.size):
            self._transport.send_control(encode(message), rank)
