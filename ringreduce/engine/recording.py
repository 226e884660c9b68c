"""The timeline of a whole job: rank 0 starts and stops it, the other engines send it what they recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringreduce.engine.letters import TimelineEvents, TimelineStart, TimelineStop, encode
from ringreduce.engine.timeline import SENT_AT_ONCE, Timeline, TimelineFile
from ringreduce.transport.base import EngineTransport


class Recording:
    """One rank's part; used by the engine's thread only."""

    def __init__(self, transport: EngineTransport, timeline: Timeline) -> None:
        self._transport = transport
        self._timeline = timeline
        self._file: TimelineFile | None = None
        self._missing: set[int] = set()
        self._done: Callable[[], None] = lambda: None
        self._ending = False

    @property
    def gathers(self) -> bool:
        """True on rank 0 while the last events of other ranks are under way."""
        return bool(self._missing)

    def start(self, file: TimelineFile, mark_cycles: bool) -> None:
        """On rank 0: begin a new file on all ranks; the one before was stopped."""
        self._file = file
        self._timeline.start(mark_cycles)
        for rank in self._others():
            self._transport.post(encode(TimelineStart(mark_cycles)), rank)

    def stop(self, done: Callable[[], None]) -> None:
        """On rank 0: ask for the last events, and call `done` when all are in the file."""
        if self._file is None:
            done()
            return
        self._timeline.stop()
        self._done, self._missing = done, set(self._others())
        for rank in self._others():
            self._transport.post(encode(TimelineStop()), rank)
            self._transport.ring(rank)  # it may have nothing to do, and would not look
        self._finish()

    def read(self, rank: int, letter: TimelineStart | TimelineStop | TimelineEvents) -> None:
        """What another rank's engine wrote."""
        if isinstance(letter, TimelineStart):
            self._timeline.start(letter.mark_cycles)
        elif isinstance(letter, TimelineStop):
            self._ending = True
        elif self._file is not None:
            self._file.add(rank, letter.events)
            if letter.last and rank in self._missing:
                self._missing.remove(rank)
                self._finish()

    def settle(self) -> None:
        """No operation is under way: send the last events, when rank 0 has asked for them."""
        if self._ending:
            self._ending = False
            self._timeline.stop()
            self.send(last=True)

    def spill(self) -> None:
        """Let no more events gather than a letter may hold."""
        if len(self._timeline.events) >= SENT_AT_ONCE:
            self.send(last=False)

    def send(self, last: bool) -> None:
        """Give this rank's events to rank 0, or to the file there."""
        events = self._timeline.take()
        if self._transport.rank != 0:
            self._transport.post(encode(TimelineEvents(events, last)), 0)
        elif self._file is not None:
            self._file.add(0, events)

    def _finish(self) -> None:
        if not self._missing:
            self.close()

    def close(self) -> None:
        """On rank 0: write what there is, and close the file."""
        self._missing = set()
        self._timeline.stop()
        if self._file is not None:
            self.send(last=True)
            self._file.close()
            self._file = None
        done, self._done = self._done, lambda: None
        done()

    def _others(self) -> Sequence[int]:
        return [rank for rank in range(self._transport.size) if rank != self._transport.rank]
