"""Python stacks as faulthandler writes them: read, cut to what a user looks for, and turned the way Python prints them.

faulthandler writes from inside a signal handler, so it prints file, line and function only, innermost first, in ASCII.
Here that becomes text which is equal where the stacks of ranks are.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

_HEAD = re.compile(r"(?:Stack|Current thread .*) \(most recent call first\):\s*$")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)$')
_NOT_ASCII = re.compile(r"\\(?:x([a-f][0-9a-f])|u([0-9a-f]{4})|U(00(?:0[0-9a-f]|10)[0-9a-f]{4}))")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib\d*/python3\.\d+t?/|^<frozen |/launcher/hook/|/ringrun/hook/")

Source = Callable[[str, int], str]


class Frame(NamedTuple):
    """Where one function of a stack is; `line` is 0 where Python does not know it."""

    file: str
    line: int
    function: str

    def is_library(self, package: str = "") -> bool:
        """Whether it is not the user's own: Python's, installed, or in the folder `package`."""
        return bool(_LIBRARY.search(self.file)) or bool(package and self.file.startswith(package + os.sep))


def parse(text: str) -> list[Frame]:
    """Return the stack in faulthandler's `text`, the innermost frame last; of several, the last stack."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            frames = []
        elif match := _FRAME.match(line):
            line_number = int(match[2]) if match[2].isdecimal() else 0
            frames.append(Frame(_decoded(match[1]), line_number, _decoded(match[3])))
    return frames[::-1]


def _decoded(name: str) -> str:
    """Return the name of a file or a function with the letters for which faulthandler has written escapes."""
    return _NOT_ASCII.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), name)


def source_line(file: str, line: int) -> str:
    """Return a line of a source file on this host, without its indentation; empty if it cannot be read."""
    import linecache  # agents read stacks, and no sources

    linecache.checkcache(file)
    return linecache.getline(file, line).strip()


def describe(
    frames: Sequence[Frame], package: str = "", source: Source = source_line, *, waits: bool = False
) -> list[str]:
    """Return the stack's lines as Python prints them; the line of source stands with the user's own frames only.

    package: the folder of ringreduce, whose frames are no user's.
    waits:   it is known what is waited for in there, so the frames there say nothing more.
    """
    shown = list(frames)
    while waits and len(shown) > 1 and shown[-1].is_library(package):
        shown.pop()
    lines = []
    for frame in shown:
        lines.append(f'  File "{frame.file}", line {frame.line or "?"}, in {frame.function}')
        if not frame.is_library(package) and (text := source(frame.file, frame.line)):
            lines.append(f"    {text}")
    return lines


def innermost(frames: Sequence[Frame], package: str = "", source: Source = source_line) -> str:
    """Return the user's own innermost line: `train.py:41, in step: loss.backward()`; empty where no code runs."""
    if not frames:
        return ""
    own = [frame for frame in frames if not frame.is_library(package)]
    frame = (own or frames)[-1]
    text = source(frame.file, frame.line) if own else ""
    where = f"{os.path.basename(frame.file)}:{frame.line or '?'}, in {frame.function}"
    return f"{where}: {text}" if text else where
