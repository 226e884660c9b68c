"""ringrun's stdout and stderr, and the one thread that writes to them: nobody else waits for whoever reads them."""

import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable
from functools import partial

Work = Callable[[], None]

_LOOK_S = 0.5
"""How often a stream that nobody reads is asked whether the job still wants it written."""


class Writer:
    """A thread that does what it is handed, in that order; who hands it work never waits."""

    def __init__(self, report: Callable[[Exception], None], look: Callable[[], float | None] = lambda: None) -> None:
        """report: called with an error in a piece of work, after which the thread goes on.

        look: does what is due, between two pieces of work; returns in how many seconds more is, None for never.
        """
        self._report = report
        self._look = look
        self._work: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._is_started = False

    def put(self, work: Work) -> None:
        """Do `work` when all before it is done."""
        self._work.put(work)
        with self._starting:  # not before: threads and the fork that starts mpirun do not mix
            if not self._is_started:
                threading.Thread(target=self._run, daemon=True).start()
                self._is_started = True

    def finish(self, patience_s: float) -> bool:
        """Wait until all that was put so far is done; return whether it was in time."""
        done = threading.Event()
        self._work.put(done.set)
        return not self._is_started or done.wait(patience_s)

    def _run(self) -> None:
        while True:
            wait_s = self._attempt(self._look)
            self._attempt(partial(self._do_next, wait_s))

    def _do_next(self, wait_s: float | None) -> None:
        with contextlib.suppress(queue.Empty):
            self._work.get(timeout=wait_s)()

    def _attempt(self, do: Callable[[], float | None]) -> float | None:
        try:
            return do()
        except Exception as error:  # as without memory: what is put later is still to be done
            self._report(error)
            return None


class Stream:
    """A descriptor of ringrun's. What cannot be written is dropped, and `complaints` says so once."""

    def __init__(self, name: str, descriptor: int, complaints: "Stream | None" = None) -> None:
        """complaints: where that is said, by default here, when it can be written again."""
        self.closed = False
        """Whether nobody reads it any more."""
        self.waits = True
        """Whether to wait for a reader who pauses; else what he does not take is dropped."""
        self._name = name
        self._descriptor = descriptor
        self._complaints = complaints or self
        self._owed = b""
        self._has_complained = False

    def write(self, data: bytes) -> None:
        """Write all of `data`, ringrun's own complaints before it."""
        view = memoryview(self._owed + data)
        try:
            while view and self._is_read():
                with contextlib.suppress(BlockingIOError):  # somebody has made our terminal non-blocking
                    view = view[os.write(self._descriptor, view[: select.PIPE_BUF]) :]
            self._owed = b""
        except BrokenPipeError:
            self.closed = True
        except OSError as error:  # a disk that is full, a terminal that is gone
            self._complain(error.strerror or str(error))

    def _is_read(self) -> bool:
        """Wait until a piece can be written; return False where that is not worth it any more."""
        while not self.closed and not select.select([], [self._descriptor], [], _LOOK_S)[1]:
            self.closed = not self.waits
        return not self.closed

    def _complain(self, why: str) -> None:
        if self._has_complained:
            return
        self._has_complained = True
        lost = "its lines are lost while that lasts, but the job continues"
        text = f"ringrun: {self._name} cannot be written: {why}; {lost}\n"
        self._complaints._owed += text.encode()
        if self._complaints is not self:
            self._complaints.write(b"")
