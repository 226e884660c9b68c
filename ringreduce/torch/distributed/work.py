"""An operation that was begun: waiting for it, and its future.

A future's callbacks run where it is completed, and may wait for the next operation, as PowerSGD's do. So that is never
the engine's thread, but one of a few that are made when all others are busy.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.execution.submission import Handle


class Work(dist.Work):
    """See torch.distributed's Work.  outputs: the value of its future."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.handle: Handle  # set right after the operation is submitted
        self.over = False
        self._outputs = outputs
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._source = -1
        self._is_told = False
        self.devices: list[torch.device | str | int] = []  # the GPU, if it has tensors there

    def of(self, outputs: Any) -> Work:
        """Itself, with other outputs."""
        self._outputs = outputs
        return self

    def end(self, error: Exception | None) -> None:
        """The operation has ended; called by the engine's thread."""
        with self._lock:
            self._error, self.over = error, True
            has_future = self._future is not None
        if has_future:
            _HELPERS.run(self.tell)

    def tell(self) -> None:
        """Complete the future, once."""
        with self._lock:
            if self._is_told or not self.over or self._future is None:
                return
            self._is_told = True
        if self._error is None:
            if self.devices:  # the future is done when this thread's current stream is
                self.handle.wait()
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done; raises its error, or StalledError after the timeout."""
        given_s = timeout.total_seconds() if timeout is not None else 0.0
        self._source = self.handle.wait(given_s if given_s > 0 else -1)
        return True

    def synchronize(self) -> None:
        """Wait until the operation is done."""
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future(devices=self.devices)
            future = self._future
        if not self.over and BACKWARD.runs():
            BACKWARD.add(self)
        self.tell()
        return future

    def is_completed(self) -> bool:
        """True when the operation is over, also when it has failed."""
        return self.over

    def is_success(self) -> bool:
        """True when the operation is over, and has not failed."""
        return self.over and self._error is None

    def exception(self) -> Exception | None:
        """What went wrong."""
        return self._error

    def result(self) -> Any:
        """The outputs."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """From where a message has come, a rank of the group."""
        self.wait()
        return self._source

    _source_rank = source_rank


class _Backward:
    """Works whose futures were asked for in a backward pass, as DDP's hooks do.

    When backward is over, DDP waits for futures, which polls nothing: just before, wait for the operations themselves.
    """

    def __init__(self) -> None:
        self._asked: dict[int, list[Work]] = {}  # by pass
        self._ending = -1

    def runs(self) -> bool:
        """True in a thread that runs backward, which is not over."""
        return torch._C._current_graph_task_id() not in (-1, self._ending)

    def add(self, work: Work) -> None:
        number = torch._C._current_graph_task_id()
        if number not in self._asked:
            self._asked[number] = []
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(number))
        self._asked[number].append(work)

    def _end(self, number: int) -> None:
        self._ending = number
        for work in self._asked.pop(number):
            work.wait()
            work.tell()


BACKWARD = _Backward()


class _Helpers:
    """Threads that run functions which may wait for each other: a new one when none is free."""

    def __init__(self) -> None:
        self._functions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._free = threading.Semaphore(0)
        os.register_at_fork(after_in_child=self.__init__)  # type: ignore[misc] # which has none of the threads

    def run(self, function: Callable[[], object]) -> None:
        if not self._free.acquire(blocking=False):
            threading.Thread(target=self._serve, name="ringreduce futures", daemon=True).start()
        self._functions.put(function)

    def _serve(self) -> None:
        while True:
            self._functions.get()()
            self._free.release()


_HELPERS = _Helpers()
