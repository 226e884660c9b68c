"""Waiting for a GPU as one waits for a message: the thread tests, and does something else meanwhile."""

from __future__ import annotations

from ringreduce.cuda.runtime import Event
from ringreduce.transport import waiting


class Done:
    """See `transport.base.Request`: this rank's GPU has come as far as an event."""

    def __init__(self, event: Event, rank: int) -> None:
        self._event = event
        self.peer = rank

    def done(self) -> bool:
        """See `Request.done`."""
        return self._event.done()

    def wait(self) -> None:
        """See `Request.wait`."""
        waiting.until(self._event.done)
