"""What an agent can report about its running rank: what it waits for, and its main thread's Python stack.

    ringrun ── Ask → agent ── datagram → ringreduce in the rank: what it waits for
                           └─ signal   → faulthandler in each Python of the rank (hook/sitecustomize.py): its stack
    ringrun ← Answer ┘

A signal goes to processes only that have left a file here, hold it open, and catch that signal: to no other program.
Only the thread that gets it is shown: faulthandler would show all, but a thread that runs just then, as ringreduce's
does, changes its frames under the reader, who then crashes. That happened once in a hundred times.
"""

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ..connection.wire import Answer
from ..environment import error_file
from ..processes import signal_main_thread, signals_caught, state_of
from ..report import traces
from .rank_socket import RankSocket

ANSWER_S = 0.3
"""How long a rank has to answer: the other ranks of a job that fails are asked half a second before they are ended."""
_LOOK_S = 0.01
_QUIET_LOOKS = 3  # a dump has no end mark: it is whole when it has not grown for so many looks
_HEADER = re.compile(r"(\d+)\n")

_STATES = {
    "T": "it is stopped (by SIGSTOP, Ctrl-Z or a debugger)",
    "t": "it is stopped by a debugger",
    "D": "it is stuck in the kernel (uninterruptible), waiting for a disk, a network file system or a device",
    "X": "its first process has ended",
    "Z": "its main thread has ended, but other threads still run",
    "R": "it is busy",
    "S": "it sleeps",
    "I": "it sleeps",
}
_DEAF_STATES = "TtDZX"


class Offer(NamedTuple):
    """A Python process that writes its stacks to the end of the file at `path` when it gets signal `number`."""

    pid: int
    path: Path
    number: int


class StackDumper:
    """One agent's, for the rank whose files are in `directory`; `send` takes its messages to ringrun."""

    def __init__(self, directory: str, rank: int, rank_socket: RankSocket, send: Callable[[Answer], None]) -> None:
        self._files = error_file(directory, rank)
        self._socket = rank_socket
        self._send = send
        self._lock = threading.Lock()  # one question at a time: answers are read from the ends of files

    def pids(self) -> list[int]:
        """Return the numbers of the rank's Python processes, those that have ended too."""
        files = self._files.parent.glob(f"{self._files.name}.stacks.*")
        return [int(path.suffix[1:]) for path in files if path.suffix[1:].isdecimal()]

    def answer(self, number: int, pid: int) -> None:
        """Send the Answer that question `number` asks for, of the rank whose first process is `pid`."""
        with self._lock:
            until_s = time.monotonic() + ANSWER_S
            asked = self._socket.ask()
            dumps = _collect(list(_offers(self._files)), until_s)
            said = self._socket.answer(until_s) if asked else {}
        doing, package = str(said.get("doing", "")), str(said.get("package", self._socket.package))
        waits, stacks = bool(doing), []
        for text in dumps:
            frames = traces.parse(text)
            doing = doing or traces.innermost(frames, package)
            stacks += ["a Python process of it:"] * (len(dumps) > 1)
            stacks += traces.describe(frames, package, waits=waits)
        self._send(Answer(number, doing, "\n".join(stacks), "" if dumps else self._why_silent(pid), waits))

    def _why_silent(self, pid: int) -> str:
        offers = list(_offers(self._files))
        states = [state_of(offer.pid) for offer in offers] or [state_of(pid)]
        state = next((each for each in states if each in _DEAF_STATES), states[0])
        if offers and state not in _DEAF_STATES:
            return f"its Python has not answered in {ANSWER_S:g} s; {_STATES.get(state, 'its state is unknown')}"
        if offers or state in _DEAF_STATES:
            return _STATES.get(state, "its state is unknown")
        return f"it runs no Python that ringrun can ask; {_STATES.get(state, 'its state is unknown')}"


def _offers(files: Path) -> Iterator[Offer]:
    """Yield the processes that have left a file, and still are the ones that did."""
    for path in sorted(files.parent.glob(f"{files.name}.stacks.*")):
        pid = path.suffix[1:]
        with contextlib.suppress(OSError), path.open() as file:
            header = _HEADER.match(file.read(64))
            if header and pid.isdecimal() and _holds_open(int(pid), path):
                offer = Offer(int(pid), path, int(header[1]))
                if offer.number in signals_caught(offer.pid):
                    yield offer


def _holds_open(pid: int, path: Path) -> bool:
    wanted = path.stat()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.path.samestat(descriptor.stat(), wanted):
                return True
    return False


def _collect(offers: list[Offer], until_s: float) -> list[str]:
    """Return what each process that can answer wrote in time."""
    able = [offer for offer in offers if state_of(offer.pid) not in _DEAF_STATES]
    begins = {offer: offer.path.stat().st_size for offer in able}
    for offer in able:
        signal_main_thread(offer.pid, offer.number)
    sizes, quiet = dict(begins), dict.fromkeys(able, 0)
    while time.monotonic() < until_s and min(quiet.values(), default=_QUIET_LOOKS) < _QUIET_LOOKS:
        time.sleep(_LOOK_S)
        for offer in able:
            size = offer.path.stat().st_size
            quiet[offer] = quiet[offer] + 1 if begins[offer] < size == sizes[offer] else 0
            sizes[offer] = size
    return [text for offer in able if (text := _read_from(offer.path, begins[offer]))]


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
