"""Python stacks as faulthandler writes them: read, cut to what a user looks for, and turned the way Python prints them.

faulthandler writes from inside a signal handler, so it tells file, line and function only, innermost first, with the
identifiers of threads, which differ from rank to rank. Here they become text that is equal where the stacks are.
"""

import linecache
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)\b.*\(most recent call first\):\s*$")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib\d*/python3\.\d+t?/|^<frozen |/launcher/hook/|/ringrun/hook/")

Source = Callable[[str, int], str]


@dataclass(frozen=True)
class Frame:
    """Where one function of a stack is; `line` is 0 where Python does not know it."""

    file: str
    line: int
    function: str

    def is_library(self, package: str = "") -> bool:
        """Whether it is not the user's own: Python's, installed, or in the folder `package`."""
        return bool(_LIBRARY.search(self.file)) or bool(package and self.file.startswith(package + os.sep))


@dataclass(frozen=True)
class Thread:
    """One thread's stack, innermost frame last."""

    ident: int
    frames: tuple[Frame, ...]


def parse(text: str) -> list[Thread]:
    """Return the threads that faulthandler's `text` tells of; of one that is told twice, the later stack."""
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            frames = threads[int(match[1], 16)] = []
        elif match := _FRAME.match(line):
            frames.append(Frame(match[1], int(match[2]) if match[2].isdecimal() else 0, match[3]))
    return [Thread(ident, tuple(reversed(frames))) for ident, frames in threads.items()]


def source_line(file: str, line: int) -> str:
    """Return a line of a source file on this host, without its indentation; empty if it cannot be read."""
    linecache.checkcache(file)
    return linecache.getline(file, line).strip()


def describe_threads(
    threads: Sequence[Thread], main: int, package: str = "", source: Source = source_line, *, waits: bool = False
) -> str:
    """Return the stacks of the thread `main`, and of others that run code of the user's, as Python prints them.

    package: the folder of ringreduce, whose frames are no user's.
    waits:   it is known what the main thread waits for in there, so its frames there say nothing more.
    """
    parts = []
    for thread in sorted(threads, key=lambda thread: thread.ident != main):
        frames = list(thread.frames)
        if thread.ident == main and waits:
            while len(frames) > 1 and frames[-1].is_library(package):
                frames.pop()
        if thread.ident != main and all(frame.is_library(package) for frame in frames):
            continue
        head = [] if thread.ident == main else ["another thread:"]
        parts += [*head, *describe_frames(frames, package, source)]
    return "\n".join(parts)


def describe_frames(frames: Iterable[Frame], package: str = "", source: Source = source_line) -> list[str]:
    """Return a traceback's lines; the line of source stands with the user's own frames only."""
    lines = []
    for frame in frames:
        lines.append(f'  File "{frame.file}", line {frame.line or "?"}, in {frame.function}')
        if not frame.is_library(package) and (text := source(frame.file, frame.line)):
            lines.append(f"    {text}")
    return lines


def innermost(threads: Sequence[Thread], main: int, package: str = "", source: Source = source_line) -> str:
    """Return the user's own innermost line of the thread `main`: `train.py:41, in step: loss.backward()`."""
    frames = next((thread.frames for thread in threads if thread.ident == main), ())
    if not frames:
        return ""
    own = [frame for frame in frames if not frame.is_library(package)]
    frame = (own or frames)[-1]
    text = source(frame.file, frame.line) if own else ""
    where = f"{os.path.basename(frame.file)}:{frame.line or '?'}, in {frame.function}"
    return f"{where}: {text}" if text else where
