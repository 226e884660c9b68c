"""Hosts that leave a job while it runs: those of `ringrun join` say so (join/hub.py)."""

import contextlib
import json
import os
import select
import socket
import threading

from .events import Events, HostLeft

_LONGEST_NAME = 4096


class Departures:
    """Puts an event for each host that leaves while one attempt runs; does nothing where nobody would say so."""

    def __init__(self, names: socket.socket | None, events: Events) -> None:
        self._names, self._events = names, events
        self._end, self._other_end = os.pipe()
        with contextlib.suppress(BlockingIOError):  # what was said before the attempt is of the one before
            while names is not None and names.recv(_LONGEST_NAME, socket.MSG_DONTWAIT):
                continue
        self._thread = threading.Thread(target=self._watch, name="ringrun departures", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        os.close(self._other_end)
        self._thread.join()
        os.close(self._end)

    def _watch(self) -> None:
        names = self._names
        while names is not None and names.fileno() in select.select([names.fileno(), self._end], [], [])[0]:
            if not (name := names.recv(_LONGEST_NAME)):
                return  # who would say so has ended
            self._events.put(HostLeft(*json.loads(name)))
