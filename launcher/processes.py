"""Process groups that end when they should: with their parent, or when told."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int) -> Callable[[], None] | None:
    """Return what a child runs before exec to get signal `number` when its parent dies; None where Linux is not.

    The parent is the thread that starts the child: start it from one that lives as long as the process.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return arm


def bind_to(cpus: Collection[int]) -> Callable[[], None] | None:
    """Return what a child runs before exec to run on `cpus` only, with all it starts; None where that is not known.

    Where it is forbidden (by a sandbox, or a CPU has just been taken away) the child runs where it did.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None

    def bind() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)

    return bind


def before_exec(*steps: Callable[[], None] | None) -> Callable[[], None]:
    """Return what runs those of `steps` that there are, in this order, in a child before exec."""

    def run() -> None:
        for step in steps:
            if step is not None:
                step()

    return run


def signal_group(leader: int, number: int) -> None:
    """Send signal `number` to the process group that `leader` leads, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def end_daemon(pid: int, names: Collection[str], patience_s: float = 2.0) -> None:
    """End process `pid` if it is a program of one of these `names`: with SIGTERM, then with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() not in names:
                return
            os.kill(pid, number)
        except OSError:
            return  # it is gone, or was never ours
        time.sleep(patience_s)
