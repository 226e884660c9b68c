"""What a rank does beside communicating: the line that its script is at, its waits for a core, its memory."""

from __future__ import annotations

import collections
import functools
import inspect
import os
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ringreduce.execution.frames import current_frames
from ringreduce.monitor.launcher_link import PACKAGE

MOST_LINES, MOST_TOLD = 512, 64
PACKAGES = "/site-packages/", "/dist-packages/"
LOADERS = "/torch/utils/data/", "/tensorflow/python/data/", "/grain/"


class Sampler:
    """Of one thread, from when it is made."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._lines: collections.Counter[str] = collections.Counter()
        self._samples = 0
        native = next((each.native_id for each in threading.enumerate() if each.ident == thread), None)
        self._path = Path(f"/proc/self/task/{native}/schedstat")
        self._begun_ns = self._core_wait_ns()

    def look(self) -> None:
        """Note at which line of the user's own code it is."""
        frame = current_frames().get(self.thread)
        line = "" if frame is None else line_of(frame)
        self._samples += 1
        if line and (line in self._lines or len(self._lines) < MOST_LINES):
            self._lines[line] += 1

    def totals(self) -> dict[str, Any]:
        """At which lines it was how often; how long it waited for a core."""
        lines = dict(self._lines.most_common(MOST_TOLD))
        return {"lines": lines, "samples": self._samples, "core_wait_s": self.core_wait_s()}

    def core_wait_s(self) -> float:
        """How long another thread had the core that it needed."""
        return (self._core_wait_ns() - self._begun_ns) / 1e9

    def _core_wait_ns(self) -> int:
        """0 where the kernel does not say."""
        try:
            return int(self._path.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return 0


def line_of(innermost: FrameType) -> str:
    """The innermost line of the user's own code, such as train.py:57, and whether a data loader is at work there."""
    found, loads = "", False
    frame: FrameType | None = innermost
    while frame is not None:
        loads = loads or _loads(frame.f_code, not found)
        if not found and _is_own(frame.f_code.co_filename):
            found = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{found} (data loader)" if found and loads else found


@functools.cache
def _libraries() -> tuple[str, ...]:
    import sysconfig  # loads a large table, which only a report needs

    return (f"{PACKAGE}/", *map(sysconfig.get_path, ("stdlib", "platstdlib")), "<")


@functools.lru_cache(maxsize=4096)
def _is_own(filename: str) -> bool:
    return not filename.startswith(_libraries()) and not any(each in filename for each in PACKAGES)


@functools.lru_cache(maxsize=4096)
def _loads(code: CodeType, is_innermost: bool) -> bool:
    """True for a data loader's code; a generator of the user's is one, too, unless it calls other code of theirs."""
    if code.co_name == "__next__" or any(each in code.co_filename for each in LOADERS):
        return True
    return is_innermost and _is_own(code.co_filename) and bool(code.co_flags & inspect.CO_GENERATOR)


def memory() -> tuple[int, int]:
    """Bytes of this process in memory, and how many of these it shares with others; zeros where nobody knows."""
    try:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    except OSError:
        return 0, 0
    kib = {words[0]: int(words[1]) for words in lines if words and words[0] in ("VmRSS:", "RssShmem:")}
    return kib.get("VmRSS:", 0) << 10, kib.get("RssShmem:", 0) << 10
