"""Prints the ranks' lines: whole, each with its rank before it, stdout to stdout and stderr to stderr.

On a terminal the prefix has a colour, and a progress bar, a line that is started over and over, is shown below all
other lines, erased and drawn again as they come. Writes block while the reader is slow; so, in the end, do the ranks.
"""

import os
import re
import select
import threading
from collections.abc import Mapping, Sequence
from typing import Literal

StreamName = Literal["stdout", "stderr"]

_COLOURS = (36, 33, 32, 35, 34, 31, 96, 93, 92, 95, 94, 91)
_RESET = b"\x1b[0m"
_ERASE_LINE = b"\r\x1b[K"
_WRAP_OFF, _WRAP_ON = b"\x1b[?7l", b"\x1b[?7h"
# escape sequences other than colours: they would move the cursor out of the line that is erased
_NOT_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[^\[]|[\x00-\x08\x0b-\x1a\x7f]")
_LOCK_TIMEOUT_S = 0.5


def is_terminal(descriptor: int, environ: Mapping[str, str]) -> bool:
    """Return whether `descriptor` is a terminal that understands escape sequences."""
    return os.isatty(descriptor) and environ.get("TERM", "dumb") != "dumb"


class Prefix:
    """`[rank] `, as wide for every rank."""

    def __init__(self, size: int, *, colour: bool) -> None:
        self._width = len(str(size - 1))
        self._colour = colour

    def of(self, rank: int) -> bytes:
        """Return the prefix of `rank`, without the space after it."""
        text = f"[{rank:>{self._width}}]".encode()
        return b"\x1b[%dm%s%s" % (_COLOURS[rank % len(_COLOURS)], text, _RESET) if self._colour else text

    def apply(self, rank: int, line: bytes) -> bytes:
        """Return `line` with its prefix, without a newline."""
        return self.of(rank) + b" " + line if line else self.of(rank)


class _Stream:
    def __init__(self, descriptor: int, size: int, environ: Mapping[str, str]) -> None:
        self.descriptor = descriptor
        self.terminal = is_terminal(descriptor, environ)
        self.prefix = Prefix(size, colour=self.terminal and not environ.get("NO_COLOR"))
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
    """ringrun's stdout and stderr, shared by the threads that read from the ranks."""

    def __init__(self, size: int, environ: Mapping[str, str], stdout: int = 1, stderr: int = 2) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {
            "stdout": _Stream(stdout, size, environ),
            "stderr": _Stream(stderr, size, environ),
        }
        self._frame = b""
        self._frame_stream: _Stream | None = None
        self._frame_of: tuple[int, str] | None = None

    @property
    def closed(self) -> bool:
        """Whether nobody reads stdout any more."""
        return self._streams["stdout"].closed

    def write(self, rank: int, name: StreamName, lines: Sequence[bytes], frame: bytes = b"") -> None:
        """Print whole `lines` of `rank`; on a terminal also show `frame`, its progress bar so far."""
        stream = self._streams[name]
        text = b"".join(stream.prefix.apply(rank, line) + b"\n" for line in lines)
        with self._lock:
            if stream.terminal and (frame or self._frame_of == (rank, name)):
                shown = stream.prefix.apply(rank, _NOT_COLOUR.sub(b"", frame)) if frame.strip() else b""
                self._replace(stream, text, shown, (rank, name))
            elif text:
                self._print_above(stream, text)

    def message(self, lines: Sequence[str]) -> None:
        """Print ringrun's own `lines` on stderr, below all others; does not wait long for a blocked reader."""
        text = "".join(f"{line}\n" for line in lines).encode(errors="replace")
        locked = self._lock.acquire(timeout=_LOCK_TIMEOUT_S)
        try:
            self._replace(self._streams["stderr"], text, b"", None)
        finally:
            if locked:
                self._lock.release()

    def _print_above(self, stream: _Stream, text: bytes) -> None:
        self._erase()
        stream.write(text)
        self._draw()

    def _replace(self, stream: _Stream, text: bytes, frame: bytes, frame_of: tuple[int, str] | None) -> None:
        self._erase()
        if text:
            stream.write(text)
        self._frame, self._frame_stream, self._frame_of = frame, stream, frame_of
        self._draw()

    def _erase(self) -> None:
        if self._frame and self._frame_stream:
            self._frame_stream.write(_ERASE_LINE)

    def _draw(self) -> None:
        if self._frame and self._frame_stream:
            self._frame_stream.write(_WRAP_OFF + self._frame + _RESET + _WRAP_ON)
