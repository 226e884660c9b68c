"""The timeline of a whole job: rank 0 starts and stops it, the other engines send it what they recorded.

A file that cannot be written ends the recording, not the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ringreduce.engine.protocol import TimelineEvents, TimelineStart, TimelineStop, encode
from ringreduce.log import LOGGER
from ringreduce.monitor.timeline import SENT_AT_ONCE, Event, Timeline, TimelineFile
from ringreduce.transport.base import EngineTransport

SEND_S = 20e-3
"""Events wait so long to be sent together: with rank 0's look at its control messages they are in the file within 100
ms."""


class Recording:
    """One rank's part; used by the engine's thread only."""

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
        """True while events may come or go: the engine must look for control messages often."""
        return self._timeline.recording or bool(self._timeline.events or self._missing)

    def start(self, file: TimelineFile, mark_cycles: bool, done: Callable[[], None]) -> None:
        """On rank 0: begin a new file on all ranks, and call `done`; the one before was stopped."""
        self._file = file
        self._timeline.start(mark_cycles)
        for rank in self._others():
            self._transport.send_control(encode(TimelineStart(mark_cycles)), rank)
        done()

    def stop(self, done: Callable[[], None]) -> None:
        """On rank 0: ask for the last events, and call `done` when all are in the file."""
        if self._file is None:
            done()
            return
        self._timeline.stop()
        self._done, self._missing = done, set(self._others())
        for rank in self._others():
            self._transport.send_control(encode(TimelineStop()), rank)
        self._finish()

    def read(self, rank: int, message: TimelineStart | TimelineStop | TimelineEvents) -> None:
        """What another rank's engine wrote."""
        if isinstance(message, TimelineStart):
            self._timeline.start(message.mark_cycles)
        elif isinstance(message, TimelineStop):
            self._ending = True
        else:
            self._write(rank, message.events)
            if message.last and rank in self._missing:
                self._missing.remove(rank)
                self._finish()

    def settle(self) -> None:
        """No operation is under way: send the last events, when rank 0 has asked for them."""
        if self._ending:
            self._ending = False
            self._timeline.stop()
            self.send(last=True)

    def spill(self) -> None:
        """Send the events, unless some were sent a moment ago."""
        count = len(self._timeline.events)
        if count >= SENT_AT_ONCE or (count and time.monotonic() - self._sent_s >= SEND_S):
            self.send(last=False)

    def send(self, last: bool) -> None:
        """Give this rank's events to rank 0, or to the file there."""
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
            for other in self._others():
                self._transport.send_control(encode(TimelineStop()), other)

    def _finish(self) -> None:
        if not self._missing:
            self.close()

    def close(self) -> None:
        """On rank 0: write what there is, and close the file."""
        self._missing = set()
        self._timeline.stop()
        if self._transport.rank == 0:
            self._write(0, self._timeline.take())
        if self._file is not None:
            self._file.close()
            self._file = None
        done, self._done = self._done, lambda: None
        done()

    def _others(self) -> Sequence[int]:
        return [rank for rank in range(self._transport.size) if rank != self._transport.rank]
