"""The agent's end of the datagrams between it and ringreduce in its rank (ringreduce/monitor/launcher_link.py).

asked    the rank answers what it waits for
unasked  it calls init(), has started MPI, is in a group of torch's, has joined no other rank, is stalled, ends with
         another code than 0; what it has measured of its steps, found in its gradients, and has to say of the job; in
         an elastic job it suspects ranks, meets others to form a world without those that are lost, has formed it, has
         left it, or awaits a restart with more hosts
told     to record its steps; in an elastic job which ranks the world is to have, which hosts have come
"""

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..connection import wire

_LONGEST_DATAGRAM = 1 << 18
_AGAIN_S = 0.2
_REPORTS: dict[str, Callable[[dict[str, Any]], wire.Report]] = {
    "stalled": lambda said: wire.Stalled(str(said["stalled"])),
    "init": lambda said: wire.InInit(float(said["init"])),
    "started": lambda _: wire.Initialized(),
    "grouped": lambda said: wire.Grouped(*map(int, said["grouped"])),
    "alone": lambda said: wire.Alone(str(said["alone"]), bool(said["ends"]), bool(said["in_vain"])),
    "suspects": lambda said: wire.Suspects(tuple(map(int, said["suspects"])), str(said.get("why", ""))),
    "reformed": lambda said: wire.Reformed(int(said["reformed"])),
    "meeting": lambda said: wire.Meeting(int(said["meeting"])),
    "left": lambda said: wire.Left(str(said["left"])),
    "committed": lambda said: wire.Committed(str(said["committed"])),
    "measured": lambda said: wire.Measured(json.dumps(said["measured"])),
    "finding": lambda said: wire.Finding(str(said["finding"])),
    "notice": lambda said: wire.Notice(str(said["notice"])),
}
"""What ringrun is to hear of what the rank says unasked, by the key that it has."""


class RankSocket:
    """One agent's, for the rank whose error file is `files`; `send` takes its messages to ringrun."""

    def __init__(self, files: Path, send: Callable[[wire.Report], None]) -> None:
        self._files = files
        self._send = send
        self._reading = threading.Lock()
        self._heard = threading.Condition()
        self._answer: dict[str, Any] | None = None
        self._notified: dict[type, bytes] = {}  # the last of each kind, for a rank that is late to listen
        self._full: set[type] = set()  # the kinds that are to be sent again, since the rank's queue had no room
        self.package = ""
        """Where ringreduce is, whose frames are no user's."""
        self._on_init: Callable[[Sequence[str]], None] = lambda _: None
        self._on_exit: Callable[[int, int], None] = lambda *_: None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"{files}.agent")

    def start(self, on_init: Callable[[Sequence[str]], None], on_exit: Callable[[int, int], None]) -> None:
        """Begin to listen.

        on_init: is called when ringreduce has started MPI, with lines of /proc/PID/maps that name files in shared
                 memory.
        on_exit: when a Python of the rank is about to end, with its process, and a code other than 0.
        """
        self._on_init, self._on_exit = on_init, on_exit
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self) -> bool:
        """Ask what the rank waits for; False where no ringreduce is there, or has just ended, or it reads nothing."""
        self._answer = None
        try:
            self._tell(b"doing")
        except OSError:
            return False
        return True

    def answer(self, until_s: float) -> dict[str, Any]:
        """Wait for the answer; empty if none comes in time."""
        with self._heard:
            self._heard.wait_for(lambda: self._answer is not None, max(0.0, until_s - time.monotonic()))
            return self._answer or {}

    def notify(self, message: wire.Membership | wire.Hosts | wire.Record) -> None:
        """Let the rank know what it is told, now or when it listens."""
        said = {"membership": message._asdict()} if isinstance(message, wire.Membership) else message._asdict()
        self._notified[type(message)] = json.dumps(said).encode()
        if type(message) not in self._full:
            self._deliver(type(message))

    def _deliver(self, kind: type) -> None:
        """Send the last one of this kind; later, where the rank, whose Python may stand still, reads nothing now."""
        self._full.discard(kind)
        try:
            self._tell(self._notified[kind])
        except BlockingIOError:
            again = threading.Timer(_AGAIN_S, self._deliver, [kind])
            again.daemon = True
            self._full.add(kind)
            try:
                again.start()
            except RuntimeError:  # too many threads there
                self._full.discard(kind)
        except OSError:  # no ringreduce listens
            return

    def _tell(self, datagram: bytes) -> None:
        self._socket.sendto(datagram, socket.MSG_DONTWAIT, f"{self._files}.ask")

    def _listen(self) -> None:
        while True:
            select.select([self._socket], [], [])
            self.read()

    def read(self) -> None:
        """Pass on what the rank has said so far."""
        with self._reading, contextlib.suppress(BlockingIOError):
            while True:
                self._handle(_decode(self._socket.recv(_LONGEST_DATAGRAM, socket.MSG_DONTWAIT)))

    def _handle(self, said: dict[str, Any]) -> None:
        if "exits" in said:
            with contextlib.suppress(KeyError, ValueError, TypeError):
                self._on_exit(int(said["pid"]), int(said["exits"]))
            return
        report = _report(said)
        if report is None:
            with self._heard:
                self._answer = said
                self._heard.notify()
            return
        self._send(report)
        if isinstance(report, wire.InInit):
            self.package = str(said.get("package", ""))
        elif isinstance(report, wire.Initialized):
            lines = said.get("shared")
            self._on_init(lines if isinstance(lines, list) else [])
            for kind in list(self._notified):
                self._deliver(kind)


def _decode(datagram: bytes) -> dict[str, Any]:
    """Return what ringreduce said; what does not parse says nothing."""
    with contextlib.suppress(ValueError):
        said = json.loads(datagram)
        return said if isinstance(said, dict) else {}
    return {}


def _report(said: dict[str, Any]) -> wire.Report | None:
    """Return what ringrun is to hear of what the rank said; None for an answer, and for what nobody says."""
    with contextlib.suppress(ValueError, TypeError):
        return next((make(said) for key, make in _REPORTS.items() if key in said), None)
    return None
