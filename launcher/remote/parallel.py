"""Runs many child processes at once, from one thread, and keeps what each writes until its end or a time limit.

No threads, since Ctrl-C must end the children (`finally`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO

from ..processes import signal_group, start_with_parent

AT_ONCE = 256
"""Child processes at the same time: with two pipes each they stay below the usual limit of 1024 open files."""

_CHUNK_BYTES = 1 << 16
_LOOK_EVERY_S = 0.05
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
    """When each part of stdout came, since the epoch, by the number of bytes there were then."""

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
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                with _uninterrupted():
                    while waiting and len(running) < at_once:
                        running += _started(*waiting.pop(), selector, timeout_s)
                for key, _ in selector.select(_LOOK_EVERY_S):
                    key.data()
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


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait: it could come when a child runs already, and nobody knows yet that it must be ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _started(task: Task, outcome: Outcome, selector: selectors.BaseSelector, timeout_s: float) -> list[_Child]:
    """Return the child that runs it; none where it cannot be started."""
    try:
        return [_Child(task, outcome, selector, time.monotonic() + timeout_s)]
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        outcome.not_run = (error.strerror if isinstance(error, OSError) else str(error)) or repr(error)
        outcome.code, outcome.is_over = _NOT_RUN, True
        return []


class _Child:
    """A running process, and the pipes with what it writes."""

    def __init__(self, task: Task, outcome: Outcome, selector: selectors.BaseSelector, deadline_s: float) -> None:
        self._outcome = outcome
        self._selector = selector
        self._deadline_s = deadline_s
        with tempfile.TemporaryFile() as stdin:  # not a pipe, which would have to be fed
            stdin.write(task.stdin)
            stdin.seek(0)
            self._process = start_with_parent(
                task.argv,
                signal.SIGTERM,
                env=task.environment,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches ringrun alone, and no child asks at the terminal
            )
        assert self._process.stdout
        assert self._process.stderr
        self._pipes = [self._process.stdout, self._process.stderr]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, partial(self._read, pipe))

    def is_over(self, now_s: float) -> bool:
        """Return whether the process has ended or must end now. Its own children may hold its pipes for ever."""
        return self._process.poll() is not None or now_s >= self._deadline_s

    def close(self) -> None:
        """Note how the process ended; end it and its own children if it has not."""
        self._outcome.code, self._outcome.is_over = self._process.poll(), True
        if self._outcome.code is None:
            signal_group(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE_S)
            signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in self._pipes:
            while not pipe.closed and self._read(pipe):
                pass  # what it wrote last
            self._forget(pipe)

    def _forget(self, pipe: IO[bytes]) -> None:
        if not pipe.closed:
            self._selector.unregister(pipe)
            pipe.close()

    def _read(self, pipe: IO[bytes]) -> bool:
        """Take what is there; return whether there was anything."""
        try:
            data = os.read(pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._forget(pipe)
        elif pipe is self._process.stdout:
            self._outcome.stdout += data
            self._outcome.arrived_s[len(self._outcome.stdout)] = time.time()
        else:
            self._outcome.stderr += data
        return bool(data)
