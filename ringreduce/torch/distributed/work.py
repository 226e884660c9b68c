"""An operation that was begun: waiting for it, and its future.

A future's callbacks run where it is completed, and may wait for the next operation, as PowerSGD's do. So that is never
the engine's thread.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringreduce.execution.submission import Handle
from ringreduce.torch.distributed.tensors import seconds


class Work(dist.Work):
    """See torch.distributed's Work.  outputs: the value of its future."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.handle: Handle  # set right after the operation is submitted
        self.devices: list[torch.device | str | int] = []  # the GPU, if it has tensors there
        self.is_waited_for = False  # by a thread that will tell
        self._outputs = outputs
        self._is_over, self._is_told = False, False
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._future: torch.futures.Future[Any] | None = None
        self._source = -1

    def end(self, error: Exception | None) -> None:
        """The operation has ended; called by the engine's thread."""
        with self._lock:
            self._error, self._is_over = error, True
            needs_thread = self._future is not None and not self.is_waited_for
        if needs_thread:
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                threading.Thread(target=self.tell, name="ringreduce future", daemon=True).start()

    def tell(self) -> None:
        """Complete the future, once."""
        with self._lock:
            if self._is_told or not self._is_over or self._future is None:
                return
            self._is_told = True
        if self._error is not None:
            self._future.set_exception(self._error)
            return
        if self.devices:  # the future is done when this thread's current stream is
            self.handle.wait()
        self._future.set_result(self._outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is done; raises its error, or StalledError after the timeout."""
        self._source = self.handle.wait(seconds(timeout, -1))
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
        if not self._is_over and BACKWARD.runs():
            BACKWARD.add(self)
        self.tell()
        return future

    def is_completed(self) -> bool:
        """True when the operation is over, also when it has failed."""
        return self._is_over

    def is_success(self) -> bool:
        """True when the operation is over, and has not failed."""
        return self._is_over and self._error is None

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
            work.is_waited_for = True
            try:
                work.wait()
            finally:
                work.tell()


BACKWARD = _Backward()
