"""Prints the ranks' lines: whole, each with its rank before it, stdout to stdout and stderr to stderr.

On a terminal the prefix has a colour, and a progress bar, a line that is started over and over, is shown below all
other lines, erased and drawn again as they come. Elsewhere its newest state is a line of its own every few seconds.
Which ranks are shown, whether with the time, and whether equal lines of several ranks are shown once, `Display` says.
"""

import itertools
import math
import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..connection.wire import StreamName
from .files import OutputFiles
from .fold import Folded, Folder
from .prefix import Prefix, local_time
from .streams import Stream, Work, Writer

BAR_S = 5.0
"""How often the state of a progress bar becomes a line, where there is no terminal."""

_RESET = b"\x1b[0m"
_ERASE_LINE = b"\r\x1b[K"
_WRAP_OFF, _WRAP_ON = b"\x1b[?7l", b"\x1b[?7h"
# escape sequences other than colours: they would move the cursor out of the line that is erased
_NOT_COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[^\[]|[\x00-\x08\x0b-\x1a\x7f]")
_MOST_MESSAGES = 1000  # that wait for a reader; of more the newest are kept


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


class _Shown:
    """One of ringrun's streams, and how lines look there."""

    def __init__(self, stream: Stream, descriptor: int, environ: Mapping[str, str]) -> None:
        self.stream = stream
        self.terminal = is_terminal(descriptor, environ)
        self.colour = self.terminal and not environ.get("NO_COLOR")
        self.prefix = Prefix(1, colour=self.colour)


@dataclass
class _Bar:
    """A progress bar's newest state, the one that was shown last, and when to look again."""

    frame: bytes
    shown: bytes
    due_s: float


class Output:
    """ringrun's stdout and stderr. All methods hand work to one thread, which alone may wait for a reader.

    A second thread writes the ranks' files: a file system that hangs keeps back no report.
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
        errors = Stream("stderr", stderr)
        self._streams: dict[str, _Shown] = {
            "stdout": _Shown(Stream("stdout", stdout, errors), stdout, environ),
            "stderr": _Shown(errors, stderr, environ),
        }
        self._display = display
        self._files = files
        self._messages: deque[bytes] = deque(maxlen=_MOST_MESSAGES)
        self.on_closed: Work = lambda: None
        """Called when it turns out that nobody reads stdout any more."""
        self._has_failed = False
        self._writer = Writer(self._report, self._show_in_time)
        self._keeper = Writer(self._report) if files else self._writer
        self._bars: dict[tuple[int, StreamName], _Bar] = {}
        self._frame: tuple[bytes, Stream, tuple[int, str]] | None = None  # what it shows, where, whose it is
        self._begin(size)

    def begin(self, size: int) -> None:
        """Show the lines of another job, of `size` ranks, from here on."""
        self._keeper.put(partial(self._make_files, size))  # its thread starts now: later there may be no more threads
        self._writer.put(partial(self._begin, size))

    def _begin(self, size: int) -> None:
        self._bars.clear()
        self._shown = frozenset(range(size)) if self._display.ranks is None else self._display.ranks
        fold = self._display.fold and len(self._shown) > 1
        self._folder = Folder(sorted(self._shown)) if fold else None
        for shown in self._streams.values():
            shown.prefix = Prefix(size, colour=shown.colour, fold=fold)

    @property
    def closed(self) -> bool:
        """Whether nobody reads stdout any more."""
        return self._streams["stdout"].stream.closed

    @property
    def colours(self) -> bool:
        """Whether `message` is read on a terminal, where colours are welcome."""
        return self._streams["stderr"].colour

    def keep(self, rank: int, name: StreamName, data: bytes, then: Work) -> None:
        """Put `data`, cut anywhere, in the files of `rank`, if there are any, and say so once when that fails."""
        self._writer.put(lambda: self._keeper.put(partial(self._keep, rank, name, data, then)))

    def _make_files(self, size: int) -> None:
        """Have files for all ranks, those that have come and write nothing, too."""
        for rank in range(size):
            self._keep(rank, "stdout", b"", lambda: None)

    def _keep(self, rank: int, name: StreamName, data: bytes, then: Work) -> None:
        if self._files and (complaint := self._files.write(rank, name, data)):
            self.message([f"ringrun: {complaint}"])
        then()

    def write(self, rank: int, name: StreamName, lines: Sequence[bytes], frame: bytes = b"") -> None:
        """Print whole `lines` of `rank`; also show `frame`, its progress bar so far."""
        self._writer.put(partial(self._write, rank, name, lines, frame))

    def rank_ended(self, rank: int) -> None:
        """Let no line wait for one of `rank` any more."""
        self._writer.put(lambda: self._folder.end(rank) if self._folder and rank in self._shown else None)

    def message(self, lines: Sequence[str]) -> None:
        """Print ringrun's own `lines` on stderr, below all others."""
        self._messages.append("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        self._writer.put(self._print_message)

    def finish(self, patience_s: float) -> bool:
        """Show the lines that wait; return whether all was read in time."""
        self._writer.put(self._flush)
        return self._writer.finish(patience_s) and self._keeper.finish(patience_s)

    def close(self, patience_s: float) -> None:
        """As `finish`, but what nobody reads is dropped."""
        for shown in self._streams.values():
            shown.stream.waits = False
        self.finish(patience_s)

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            self.message([f"ringrun: output is lost, but the job continues: {type(error).__name__}: {error}"])
        self._has_failed = True

    # in the thread that writes

    def _write(self, rank: int, name: StreamName, lines: Sequence[bytes], frame: bytes) -> None:
        if rank not in self._shown:
            return
        shown, now_s = self._streams[name], time.monotonic()
        folded = self._fold(rank, name, lines, now_s)
        if shown.terminal and (frame or (self._frame and self._frame[2] == (rank, name))):
            text = _NOT_COLOUR.sub(b"", frame) if frame.strip() else b""
            texts = shown.prefix.apply((rank,), text, self._time_text(now_s)) if text else []
            self._print(folded, (b"".join(texts), shown.stream, (rank, name)))
            return
        if not shown.terminal and frame.strip():
            bar = self._bars.setdefault((rank, name), _Bar(b"", b"", now_s + BAR_S))
            bar.frame = _NOT_COLOUR.sub(b"", frame)
        else:
            self._bars.pop((rank, name), None)
        if folded:
            self._print(folded)

    def _print_message(self) -> None:
        if not self._messages:
            return  # dropped
        self._flush()
        self._erase()
        self._streams["stderr"].stream.write(self._messages.popleft())
        self._frame = None

    def _flush(self) -> None:
        if self._folder:
            self._print(self._folder.flush())

    def _fold(self, rank: int, name: StreamName, lines: Sequence[bytes], now_s: float) -> list[Folded]:
        if self._folder is None:
            return [Folded((rank,), name, line, now_s) for line in lines]
        return [shown for line in lines for shown in self._folder.add(rank, name, line, now_s)]

    def _show_in_time(self) -> float | None:
        """Show lines that have waited long enough, and progress bars; return in how many seconds there is more."""
        now_s = time.monotonic()
        folded = self._folder.expire(now_s) if self._folder else []
        for (rank, name), bar in self._bars.items():
            if bar.due_s <= now_s:
                folded += self._fold(rank, name, [bar.frame] * (bar.frame != bar.shown), now_s)
                bar.shown, bar.due_s = bar.frame, now_s + BAR_S
        if folded:
            self._print(folded)
        due_s = min([self._folder.due_s if self._folder else math.inf, *(bar.due_s for bar in self._bars.values())])
        return None if due_s == math.inf else max(0.0, due_s - time.monotonic())

    def _time_text(self, at_s: float) -> bytes:
        return local_time(time.time() - (time.monotonic() - at_s)) if self._display.time else b""

    def _print(self, lines: Sequence[Folded], frame: tuple[bytes, Stream, tuple[int, str]] | None = None) -> None:
        """Print `lines` above the progress bar, which `frame` may replace."""
        self._erase()
        for (name, at_s), same in itertools.groupby(lines, lambda folded: (folded.stream, folded.at_s)):
            shown, time_text = self._streams[name], self._time_text(at_s)
            texts = (text for folded in same for text in shown.prefix.apply(folded.ranks, folded.line, time_text))
            shown.stream.write(b"".join(text + b"\n" for text in texts))
            if self.closed:
                self.on_closed()
        self._frame = frame or self._frame
        if self._frame and self._frame[0]:
            self._frame[1].write(_WRAP_OFF + self._frame[0] + _RESET + _WRAP_ON)

    def _erase(self) -> None:
        if self._frame and self._frame[0]:
            self._frame[1].write(_ERASE_LINE)
