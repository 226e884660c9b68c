"""Processes in other namespaces, seen from outside: who runs there, and one that is started there and signalled."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.patience import patient


class Inside(subprocess.Popen):
    """A process started by an nsenter that waits for it: signals go to the process itself. Waits are patient."""

    def send_signal(self, number: int) -> None:
        while self.poll() is None:
            with contextlib.suppress(OSError, IndexError):  # nsenter has not forked yet, or waits no more
                os.kill(child_of(self.pid), number)
                return
            time.sleep(0.01)

    def communicate(self, input: str | None = None, timeout: float | None = None) -> tuple[Any, Any]:
        return super().communicate(input, timeout and patient(timeout))


def child_of(pid: int) -> int:
    """The only child of a process; IndexError if it has none."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def inner_pid(pid: int) -> int:
    """The number that a process, whose pid here is `pid`, has in its own namespace; 0 if it has ended."""
    with contextlib.suppress(OSError, StopIteration):
        return int(_status(pid, "NSpid").split()[-1])
    return 0


def processes_beside(init: int) -> Iterator[tuple[int, str]]:
    """The live processes (zombies have ended) in the pid namespace of `init`, with their command lines."""
    namespace = os.readlink(f"/proc/{init}/ns/pid")
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, StopIteration):  # it has ended meanwhile
            pid = int(path.name)
            if os.readlink(path / "ns" / "pid") == namespace and not _status(pid, "State").startswith("Z"):
                yield pid, (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def _status(pid: int, field: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{field}:"))
