"""Prints the ranks' lines: whole, each with its rank before it, stdout to stdout and stderr to stderr.

On a terminal the prefix has a colour, and a progress bar, a line that is started over and over, is shown below all
other lines, erased and drawn again as they come. Writes block while the reader is slow; so, in the end, do the ranks.
Which ranks are shown, whether with the time, and whether equal lines of several ranks are shown once, `Display` says.
"""

import itertools
import math
import os
import re
import select
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .files import OutputFiles
from .fold import Folded, Folder
from .prefix import Prefix, local_time

StreamName = Literal["stdout", "stderr"]

_RESET = b"\x1b[0m"
_ERASE_LINE = b"\r\x1b[K"
_WRAP_OFF, _WRAP_ON = b"\x1b[?7l", b"\x1b[?7h"
# escape sequences other than colours: they would move the cursor out of the line that is erased
_NOT_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[^\[]|[\x00-\x08\x0b-\x1a\x7f]")
_LOCK_TIMEOUT_S = 0.5


@dataclass(frozen=True)
class Display:
    """What is shown of the ranks' lines: those of `ranks` (None: all), equal ones `fold`ed, with the `time`."""

    ranks: frozenset[int] | None = None
    fold: bool = False
    time: bool = False


_EVERYTHING = Display()


def is_terminal(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Return whether `descriptor` is a terminal that understands escape sequences."""
    return os.isatty(descriptor) and environ.get("TERM", "dumb") != "dumb"


class _Stream:
    def __init__(self, descriptor: int, size: int, environ: Mapping[str, str], *, fold: bool) -> None:
        self.descriptor = descriptor
        self.terminal = is_terminal(descriptor, environ)
        self.colour = self.terminal and not environ.get("NO_COLOR")
        self.prefix = Prefix(size, colour=self.colour, fold=fold)
        self.closed = False

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.closed:
            try:
                view = view[os.write(self.descriptor, view) :]
            except BlockingIOError:  # somebody has made our terminal non-blocking
                select.select([], [self.descriptor], [])
            except OSError:  # EPIPE: nobody reads any more; EIO: the terminal is gone
                self.closed = True


class Output:
    """ringrun's stdout and stderr, shared by the threads that read from the ranks.

    With `display.fold` lines wait here for a moment; a thread of its own shows them in time, and `finish` the last.
    """

    def __init__(
        self,
        size: int,
        environ: Mapping[str, str],
        stdout: int = 1,
        stderr: int = 2,
        *,
        display: Display = _EVERYTHING,
        files: OutputFiles | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._shown = frozenset(range(size)) if display.ranks is None else display.ranks
        fold = display.fold and len(self._shown) > 1
        self._streams: dict[str, _Stream] = {
            "stdout": _Stream(stdout, size, environ, fold=fold),
            "stderr": _Stream(stderr, size, environ, fold=fold),
        }
        self._with_time = display.time
        self._files = files
        self._folder = Folder(sorted(self._shown)) if fold else None
        self._folding: threading.Thread | None = None
        self._lines_wait = threading.Condition(self._lock)
        self._frame = b""
        self._frame_stream: _Stream | None = None
        self._frame_of: tuple[int, str] | None = None

    @property
    def closed(self) -> bool:
        """Whether nobody reads stdout any more."""
        return self._streams["stdout"].closed

    @property
    def colours(self) -> bool:
        """Whether `message` is read on a terminal, where colours are welcome."""
        return self._streams["stderr"].colour

    def keep(self, rank: int, name: StreamName, data: bytes) -> None:
        """Put `data`, cut anywhere, in the files of `rank`, if there are any; say so once when that fails."""
        if self._files and (complaint := self._files.write(rank, name, data)):
            self.message([f"ringrun: {complaint}"])

    def write(self, rank: int, name: StreamName, lines: Sequence[bytes], frame: bytes = b"") -> None:
        """Print whole `lines` of `rank`; on a terminal also show `frame`, its progress bar so far."""
        if rank not in self._shown:
            return
        stream = self._streams[name]
        now_s = time.monotonic()
        with self._lock:
            folded = self._fold(rank, name, lines, now_s)
            if stream.terminal and (frame or self._frame_of == (rank, name)):
                bar = _NOT_COLOUR.sub(b"", frame) if frame.strip() else b""
                shown = stream.prefix.apply((rank,), bar, self._time_text(now_s)) if bar else []
                self._print(folded, (b"".join(shown), stream, (rank, name)))
            elif folded:
                self._print(folded)

    def rank_ended(self, rank: int) -> None:
        """Let no line wait for one of `rank` any more. Does not wait for a slow reader: the end may be a failure."""
        if (folder := self._folder) and rank in self._shown:
            folder.end(rank)

    def message(self, lines: Sequence[str]) -> None:
        """Print ringrun's own `lines` on stderr, below all others; does not wait long for a blocked reader."""
        text = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        stream = self._streams["stderr"]
        locked = self._lock.acquire(timeout=_LOCK_TIMEOUT_S)
        try:
            if locked and self._folder:
                self._print(self._folder.flush())
            self._erase()
            stream.write(text)
            self._frame, self._frame_stream, self._frame_of = b"", stream, None
        finally:
            if locked:
                self._lock.release()

    def finish(self) -> None:
        """Show the lines that wait, and let none wait from here on; does not wait long for a blocked reader."""
        if self._folder and self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            try:
                self._print(self._folder.flush())
                self._folder = None
                self._lines_wait.notify()
            finally:
                self._lock.release()

    def _fold(self, rank: int, name: StreamName, lines: Sequence[bytes], now_s: float) -> list[Folded]:
        if self._folder is None:
            return [Folded((rank,), name, line, now_s) for line in lines]
        had_none = self._folder.due_s == math.inf
        folded = [shown for line in lines for shown in self._folder.add(rank, name, line, now_s)]
        if self._folding is None:  # not before: threads and the fork that starts mpirun do not mix
            self._folding = threading.Thread(target=self._show_in_time, daemon=True)
            self._folding.start()
        if had_none:
            self._lines_wait.notify()
        return folded

    def _show_in_time(self) -> None:
        """Show lines that have waited long enough, until `finish`."""
        with self._lock:
            while self._folder:
                if folded := self._folder.expire(time.monotonic()):
                    self._print(folded)
                wait_s = self._folder.due_s - time.monotonic()
                self._lines_wait.wait(min(wait_s, threading.TIMEOUT_MAX) if wait_s > 0 else 0)

    def _time_text(self, at_s: float) -> bytes:
        return local_time(time.time() - (time.monotonic() - at_s)) if self._with_time else b""

    def _print(self, lines: Sequence[Folded], frame: tuple[bytes, _Stream, tuple[int, str]] | None = None) -> None:
        """Print `lines` above the progress bar, which `frame` (what it shows, where, whose it is) may replace."""
        self._erase()
        for (name, at_s), same in itertools.groupby(lines, lambda folded: (folded.stream, folded.at_s)):
            stream, time_text = self._streams[name], self._time_text(at_s)
            shown = (text for folded in same for text in stream.prefix.apply(folded.ranks, folded.line, time_text))
            stream.write(b"".join(text + b"\n" for text in shown))
        if frame:
            self._frame, self._frame_stream, self._frame_of = frame
        self._draw()

    def _erase(self) -> None:
        if self._frame and self._frame_stream:
            self._frame_stream.write(_ERASE_LINE)

    def _draw(self) -> None:
        if self._frame and self._frame_stream:
            self._frame_stream.write(_WRAP_OFF + self._frame + _RESET + _WRAP_ON)
