"""Hears that a rank of an elastic job begins to die, long before its end: see runtime/recovery/death_notice.py."""

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

_EXITING = 4  # PF_EXITING of Linux's include/linux/sched.h
_STATE, _FLAGS = 3, 9  # fields of /proc/PID/stat, counted from 1; the last one is the exit status


def await_death(files: Path, pid: int) -> int | None:
    """Wait until process `pid`, a rank whose error file is `files`, dies; return its exit code, as subprocess does.

    None where that can't be known: the rank gives no notice, or lives on.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        with open(f"{files}.death", "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        mutex = (ctypes.c_char * len(memory)).from_buffer(memory)
        if ctypes.CDLL(None).pthread_mutex_lock(mutex) == errno.EOWNERDEAD:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[_FLAGS - _STATE]) & _EXITING:
                return os.waitstatus_to_exitcode(int(fields[-1]))
    return None
