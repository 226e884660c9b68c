"""What all threads are at, without the deadlock of Python's own call."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_lock = threading.Lock()


def current_frames() -> dict[int, FrameType]:
    """As sys._current_frames, which holds a lock of the interpreter while it makes its dict.

    If the garbage is collected just then, what that calls may let another thread run; one that wants the lock, too,
    waits for it with the GIL, for ever (CPython's issue 106883).
    """
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
