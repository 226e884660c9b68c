"""Whether the kernel's OOM killer ended a rank: asked on the rank's host, by comparing before and after.

Two sources. The kernel's log names the process, where it may be read (root, or dmesg_restrict=0) and processes have
the same numbers as there (no container). A cgroup counts its processes that were killed: `oom_kill` in memory.events
(cgroup v2) or memory.oom_control (v1). Only the rank's own cgroup is asked: one above counts other jobs' too.

Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst; mm/oom_kill.c for the log's lines.
"""

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..machine.cgroups import cgroups_of

_KILLED = re.compile(r"[Oo]ut of memory: Killed process (\d+) ")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_LONGEST_RECORD = 8192
_KILLED_CODES = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the second is what a shell returns for it


class Counter(NamedTuple):
    """A file that counts OOM kills, and the cgroup's name."""

    file: Path
    cgroup: str


class OomWatch:
    """Made before a rank starts, asked after its end."""

    def __init__(self, proc: Path = Path("/proc/self"), log: str = "/dev/kmsg") -> None:
        self._before = {counter: count for counter in _counters(proc) if (count := _count(counter)) is not None}
        self._log = _open_at_end(log)

    def verdict(self, code: int, pids: Iterable[int]) -> str:
        """Return what is known of the end of a rank that had the processes `pids`; empty if there is nothing to say.

        code: its exit code, or minus a signal.
        """
        lines = list(_records(self._log)) if self._log is not None else []
        after = {counter: count for counter in self._before if (count := _count(counter)) is not None}
        return judge(code, pids, lines, self._before, after, log_is_readable=self._log is not None)


def judge(
    code: int,
    pids: Iterable[int],
    log: Iterable[str],
    before: Mapping[Counter, int],
    after: Mapping[Counter, int],
    *,
    log_is_readable: bool,
) -> str:
    """Return the verdict, from the log's new lines and the counts before the start and after the end."""
    killed = code in _KILLED_CODES
    risen = [counter.cgroup for counter in after if after[counter] > before[counter]]
    logged = {int(match[1]) for match in map(_KILLED.search, log) if match}
    where = f" (cgroup {risen[0]})" if risen else " (as the kernel's log says)"
    if killed and (risen or logged.intersection(pids)):
        return f"killed by the kernel's OOM killer: out of memory{where}"
    if risen or logged.intersection(pids):
        return f"the kernel's OOM killer killed one of its processes: out of memory{where}"
    if not killed:
        return ""
    if after or log_is_readable:
        return "there is no sign of the kernel's OOM killer"
    return "it may have been the kernel's OOM killer: neither its log nor a cgroup's counters can be read"


def _counters(proc: Path) -> Iterator[Counter]:
    """Yield where the kernel counts for the process that `proc` is of."""
    with contextlib.suppress(OSError):
        groups = (proc / "cgroup").read_text(errors="replace")
        yield from counters(groups, (proc / "mounts").read_text(errors="replace"))


def counters(groups: str, mounts: str) -> Iterator[Counter]:
    """Yield the counters that /proc/PID/cgroup and /proc/PID/mounts lead to."""
    for name, is_unified, folders in cgroups_of(groups, mounts, "memory"):
        files = [folder / ("memory.events" if is_unified else "memory.oom_control") for folder in folders]
        yield from (Counter(file, name) for file in [file for file in files if file.exists()][:1])


def _count(counter: Counter) -> int | None:
    with contextlib.suppress(OSError):
        match = _COUNT.search(counter.file.read_text(errors="replace"))
        return int(match[1]) if match else None
    return None


def _open_at_end(log: str) -> int | None:
    with contextlib.suppress(OSError):
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(descriptor, 0, os.SEEK_END)
        return descriptor
    return None


def _records(log: int) -> Iterator[str]:
    """Yield the log's records since the last call."""
    while True:
        try:
            record = os.read(log, _LONGEST_RECORD)
        except BrokenPipeError:  # some were overwritten before they were read: go on with those that are left
            continue
        except OSError:
            return
        if not record:
            return
        yield record.decode(errors="replace")
