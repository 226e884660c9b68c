"""Runs many child processes at once, from one thread, and keeps what each writes until its end or a time limit.

No threads, since Ctrl-C must end the children (`finally`). What they read and write are files: nobody feeds or empties
a pipe, or waits for one that a child's own child holds open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..processes import signal_group, start_with_parent, uninterrupted

AT_ONCE = 256
"""Child processes at the same time: with three files each they stay below the usual limit of 1024 open files."""

_LOOK_EVERY_S = 0.01
_NOT_RUN = 127  # as a shell says it
_PATIENCE_S = 1.0
PROGRESS_AFTER_S = 3.0


@dataclass(frozen=True)
class Task:
    """A program to run: its argv, what it reads, and its whole environment (None: ours)."""

    argv: Sequence[str]
    stdin: bytes = b""
    environment: Mapping[str, str] | None = None


@dataclass
class Outcome:
    """What a task did."""

    code: int | None = None
    """Its exit code, negative for a signal; None if it was ended because it took too long."""
    not_run: str = ""
    """Why it could not be executed here, if it could not."""
    stdout: bytes = b""
    stderr: bytes = b""
    is_over: bool = False
    arrived_s: dict[int, float] = field(default_factory=dict)
    """When each part of stdout was seen, since the epoch, by the number of bytes there were then."""

    def arrived_by(self, end: int) -> float:
        """Return when the first `end` bytes of stdout were there; 0 if never."""
        return next((when for length, when in self.arrived_s.items() if length >= end), 0.0)


def run_all(
    tasks: Sequence[Task],
    timeout_s: float,
    at_once: int = AT_ONCE,
    progress: Callable[[Sequence[Outcome], float], object] = lambda outcomes, after_s: None,
) -> list[Outcome]:
    """Run the tasks, `at_once` at the same time, each for at most `timeout_s`; return what they did, in their order.

    progress: called with the outcomes so far after `PROGRESS_AFTER_S`, and then whenever twice as long has passed.
    """
    outcomes = [Outcome() for _ in tasks]
    waiting = [*zip(tasks, outcomes, strict=True)][::-1]
    running: list[_Child] = []
    began_s, progress_after_s = time.monotonic(), PROGRESS_AFTER_S
    try:
        while waiting or running:
            with uninterrupted():
                while waiting and len(running) < at_once:
                    running += _started(*waiting.pop(), timeout_s)
            time.sleep(_LOOK_EVERY_S)
            now_s = time.monotonic()
            for child in [child for child in running if child.is_over(now_s)]:
                child.close()
                running.remove(child)
            if now_s - began_s >= progress_after_s and running:
                progress(outcomes, now_s - began_s)
                progress_after_s *= 2
    finally:
        for child in running:
            child.close()
    return outcomes


def _started(task: Task, outcome: Outcome, timeout_s: float) -> list[_Child]:
    """Return the child that runs it; none where it cannot be started."""
    try:
        return [_Child(task, outcome, time.monotonic() + timeout_s)]
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        outcome.not_run = (error.strerror if isinstance(error, OSError) else str(error)) or repr(error)
        outcome.code, outcome.is_over = _NOT_RUN, True
        return []


class _Child:
    """A running process, and the files that it reads and writes."""

    def __init__(self, task: Task, outcome: Outcome, deadline_s: float) -> None:
        self._outcome = outcome
        self._deadline_s = deadline_s
        with contextlib.ExitStack() as files:
            stdin, self._stdout, self._stderr = (files.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            stdin.write(task.stdin)
            stdin.seek(0)
            self._process = start_with_parent(
                task.argv,
                signal.SIGTERM,
                env=task.environment,
                stdin=stdin,
                stdout=self._stdout,
                stderr=self._stderr,
                start_new_session=True,  # Ctrl-C reaches ringrun alone, and no child asks at the terminal
            )
            self._files = files.pop_all()

    def is_over(self, now_s: float) -> bool:
        """Return whether the process has ended or must end now; note when its output came."""
        is_over = self._process.poll() is not None or now_s >= self._deadline_s
        if nbytes := os.fstat(self._stdout.fileno()).st_size:
            self._outcome.arrived_s.setdefault(nbytes, time.time())
        return is_over

    def close(self) -> None:
        """Note how the process ended, and what it wrote; end it and its own children if it has not."""
        self._outcome.code, self._outcome.is_over = self._process.poll(), True
        if self._outcome.code is None:
            signal_group(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
            signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._files:
            for file in (self._stdout, self._stderr):
                file.seek(0)
            self._outcome.stdout = self._stdout.read(max(self._outcome.arrived_s, default=0))
            self._outcome.stderr = self._stderr.read()
