"""What a rank's process does beside communicating: the line that its script is at, its processor time, its memory."""

from __future__ import annotations

import collections
import functools
import inspect
import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import cast

from ringreduce.monitor.launcher_link import PACKAGE

MOST_LINES = 512
NOT_A_SCRIPTS = (PACKAGE, *map(sysconfig.get_path, ("stdlib", "platstdlib")), "<")
PACKAGES = ("/site-packages/", "/dist-packages/", "/ringrun/")
LOADER, LOADERS = " (data loader)", ("/torch/utils/data/", "/tensorflow/python/data/", "/grain/")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Sampler:
    """Counts at which line of the user's own code a thread is."""

    def __init__(self) -> None:
        self.lines: collections.Counter[str] = collections.Counter()
        self.samples = 0

    def look(self, thread: int) -> None:
        """Add a sample."""
        frame = sys._current_frames().get(thread)
        line = "" if frame is None else line_of(frame)
        self.samples += 1
        if line and (line in self.lines or len(self.lines) < MOST_LINES):
            self.lines[line] += 1


def line_of(frame: FrameType) -> str:
    """The innermost line of the user's own code, such as train.py:57; empty where there is none.

    It is a data loader's where it, or what calls it or is called by it, is one.
    """
    found, loads, each = "", False, cast("FrameType | None", frame)
    while each is not None:
        loads = loads or _loads(each.f_code, not found)
        if not found and _is_own(each.f_code.co_filename):
            found = f"{os.path.basename(each.f_code.co_filename)}:{each.f_lineno}"
        each = each.f_back
    return found + (LOADER if found and loads else "")


@functools.lru_cache(maxsize=4096)
def _is_own(filename: str) -> bool:
    return not filename.startswith(NOT_A_SCRIPTS) and not any(each in filename for each in PACKAGES)


@functools.lru_cache(maxsize=4096)
def _loads(code: CodeType, innermost: bool) -> bool:
    """True for a data loader's code;  innermost: no frame of the user's own is further in."""
    if code.co_name == "__next__" or any(each in code.co_filename for each in LOADERS):
        return True
    return innermost and _is_own(code.co_filename) and bool(code.co_flags & inspect.CO_GENERATOR)


def processor(thread: int) -> tuple[float, float]:
    """Seconds that a thread has run, and that it was ready to run but another thread had the core; zeros: not known."""
    own = next((each.native_id for each in threading.enumerate() if each.ident == thread), None)
    try:
        ran, waited, _ = Path(f"/proc/self/task/{own}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def memory() -> tuple[int, int]:
    """Bytes of this process in memory, and how many of them are shared memory; zeros: not known."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0, 0
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    kib = [int(found.get(name, "0 kB").split()[0]) for name in ("VmRSS", "RssShmem")]
    return kib[0] << 10, kib[1] << 10
