"""The running jobs of this host: each ringrun has a file that describes its job, and a socket that takes questions.

Both are in its private directory, which no other user can enter. One line is sent, a key of `_QUESTIONS`; text comes
back, to its end. See stacks.py and top.py for who asks.
"""

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ..connection.listener import Listener, Reader
from ..connection.queued import QueuedLink
from .events import Event, Events, StacksWanted, TotalsWanted

STACKS, TOTALS, COUNTS = b"stacks\n", b"totals\n", b"counts\n"
_RECORD_S = 10.0  # so long do ranks record their steps after the last question for totals
_QUESTIONS: dict[bytes, Callable[[Callable[[list[str]], None]], Event]] = {
    STACKS: StacksWanted,
    TOTALS: partial(TotalsWanted, record_s=_RECORD_S),
    COUNTS: partial(TotalsWanted, record_s=0.0),
}
_LONGEST_QUESTION = max(map(len, _QUESTIONS))
ANSWER_S = 10.0
_DIRECTORIES = "ringrun-*"
_SOCKET, _FILE = "control", "job.json"
_REQUEST_S = 2.0


@dataclass(frozen=True)
class RunningJob:
    """What a ringrun says of its job; `socket` is where it listens.

    since_s: by time.monotonic(), which all processes of a host share, and which nobody sets, as the clock.
    """

    pid: int
    since_s: float
    size: int
    command: tuple[str, ...]
    socket: str


class ControlSocket:
    """ringrun's own side: it describes its job in `directory`, and has questions answered by `events`."""

    def __init__(self, directory: str, size: int, command: Sequence[str], events: Events) -> None:
        self._directory, self._events = directory, events
        path = Path(directory)
        job = RunningJob(os.getpid(), time.monotonic(), size, tuple(command), str(path / _SOCKET))
        (path / _FILE).write_text(json.dumps(asdict(job)))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(job.socket)

    def start(self, listener: Listener | None = None) -> None:
        """Take questions as long as `listener` takes connections; by default one of its own, which nobody may join."""
        if listener is None:
            listener = Listener(self._directory, [], 1)
            listener.start(_unknown)
        listener.listen(self._socket, partial(_serve, self._events))


def _unknown(link: QueuedLink) -> Reader:
    raise AssertionError("nobody has been told this listener's key")


def _serve(events: Events, connection: socket.socket) -> None:
    answered = threading.Event()
    answer: list[str] = []

    def deliver(lines: list[str]) -> None:
        answer.extend(lines)
        answered.set()

    with contextlib.suppress(OSError), connection:
        connection.settimeout(_REQUEST_S)
        if wanted := _QUESTIONS.get(connection.recv(_LONGEST_QUESTION)):
            events.put(wanted(deliver))
            answered.wait(ANSWER_S)
            connection.sendall("".join(f"{line}\n" for line in answer).encode(errors="backslashreplace"))


def find_jobs() -> list[RunningJob]:
    """Return this user's running jobs on this host, the oldest first."""
    found = {job.pid: job for path in _sockets() if (job := _read(path)) and _answers(job)}
    return sorted(found.values(), key=lambda job: job.since_s)


def _sockets() -> Iterator[Path]:
    """Yield where jobs may listen: in the usual folders, and, as the kernel lists it, wherever TMPDIR was."""
    folders = {"/tmp"}  # noqa: S108 - looked at, not written to
    with contextlib.suppress(FileNotFoundError):  # this process may write in none
        folders.add(tempfile.gettempdir())
    for folder in folders:
        yield from Path(folder).glob(f"{_DIRECTORIES}/{_SOCKET}")
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines():
            path = Path(line.rpartition(" ")[2])
            if path.name == _SOCKET and path.parent.match(_DIRECTORIES):
                yield path


def _read(path: Path) -> RunningJob | None:
    try:
        if path.parent.stat().st_uid != os.geteuid():
            return None
        fields = json.loads((path.parent / _FILE).read_text())
        return RunningJob(
            int(fields["pid"]), float(fields["since_s"]), int(fields["size"]), tuple(fields["command"]), str(path)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # another user's, or of a ringrun that is just starting or ending


def _answers(job: RunningJob) -> bool:
    """Return whether its ringrun is there; one that was killed leaves its directory behind."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        probe.connect(job.socket)
        return True
    return False


def ask(job: RunningJob, question: bytes) -> str:
    """Return what the job says to a key of `_QUESTIONS`; OSError where it cannot be asked, empty if it has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(job.socket)
        connection.sendall(question)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")
