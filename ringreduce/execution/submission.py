"""One submission on this rank: its tensors, its operation, and the handle for its result."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.gpu_buffer import GpuBuffer
from ringreduce.errors import StalledError
from ringreduce.execution.signature import Signature
from ringreduce.gpu.runtime import Event


def _nothing() -> None:
    return None


class Handle:
    """An asynchronous operation. `poll(handle)` is True when it is done, `synchronize(handle)` returns its result."""

    __slots__ = ("__weakref__", "_done", "_error", "_gate", "_on_poll", "_on_wait", "_result", "_then", "signature")

    def __init__(
        self,
        signature: Signature,
        on_wait: Callable[[Handle, float], None],
        on_poll: Callable[[], object] = _nothing,
        then: Callable[[Exception | None], object] | None = None,
    ) -> None:
        """then: called by the engine's thread just before the operation is done; must neither wait nor raise."""
        self.signature = signature
        self._then = then
        self._on_wait = on_wait
        self._on_poll = on_poll
        self._done = False
        self._gate = gate = threading.Lock()  # making an Event takes ten times as long
        gate.acquire()
        self._error: Exception | None = None
        self._result: Callable[[], Any] = _nothing

    def done(self) -> bool:
        """True when `wait` would return or raise at once."""
        return self._done

    def poll(self) -> bool:
        """As `done`; makes the engine stop batching."""
        if not self._done:
            self._on_poll()
        return self._done

    def wait(self, timeout_s: float = -1) -> Any:
        """Wait for the operation, and return its result; raises its error, or StalledError after a timeout >= 0."""
        if not self._done:
            self._on_wait(self, timeout_s)
            if not self._done:
                kind, name, *_ = self.signature
                raise StalledError(
                    f"{kind} {name!r}: Timed out after {timeout_s:g} s; other ranks may not have called it"
                )
        if self._error is not None:
            raise copy.copy(self._error)  # one per waiter: a traceback belongs to one raise
        return self._result()

    def block(self, timeout_s: float = -1) -> None:
        """Return when the operation is complete or has failed, or after a timeout >= 0."""
        if self._gate.acquire(timeout=timeout_s):
            self._gate.release()

    def end(self, result: Callable[[], Any], error: Exception | None = None) -> None:
        """Let `wait` return `result()` or raise `error`; called by the engine, once."""
        self._result, self._error = result, error
        if self._then is not None:
            self._then(error)
        self._done = True
        self._gate.release()

    def __repr__(self) -> str:
        return f"<Handle of {self.signature.kind} {self.signature.name!r}, {'done' if self.done() else 'pending'}>"


_NOWHERE: dict[str, Any] = {}


class Submission:
    """One submission of this rank; that of a group has many tensors."""

    # fmt: off
    __slots__ = (
        "__weakref__", "done", "finish", "handle", "in_flight", "inputs", "key", "line", "missing_pieces", "outputs",
        "payload", "process_set", "ready", "retire", "signature", "submitted_s", "waits",
    )
    # fmt: on

    def __init__(
        self,
        signature: Signature,
        process_set: int,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        finish: Callable[[Submission], Any],
        payload: Any,
        line: str,
        handle: Handle | None,
        waits: bool,
        ready: Sequence[Event] = (),
    ) -> None:
        self.signature = signature
        self.key = signature.key
        self.process_set = process_set
        self.inputs = inputs
        self.outputs = outputs  # the inputs themselves for an operation in place
        self.finish = finish  # makes the caller's result; called by the thread that waits
        self.payload = payload  # further arguments or results: splits, pickled bytes, a flag
        self.line = line
        self.handle = handle  # none for the neutral elements of a joined rank
        self.waits = waits
        self.ready = ready  # events of the caller's streams after which inputs on a GPU may be read
        self.submitted_s = time.monotonic()
        self.missing_pieces = 0
        self.retire: Callable[[Sequence[Buffer]], Event] | None = None
        """Keeps GPU memory alive until the GPU reaches the returned event; see Gpu.retire."""
        self.done: Event | None = None  # after which outputs on a GPU hold the results
        self.in_flight: dict[str, Submission] = _NOWHERE
        """The running submissions of its process set; it is removed before its waiter may submit the name again."""

    def begin(self, in_flight: dict[str, Submission]) -> None:
        """Add it to the running submissions. Other threads read these at once, as list(in_flight.values())."""
        self.in_flight = in_flight
        in_flight[self.key] = self

    def complete(self) -> None:
        """Complete the handle: the outputs hold the results, or will when the GPU has done the engine's work."""
        if self.retire is not None:
            self.done = self.retire([*self.inputs, *self.outputs])
        self._end(self._result)

    def _result(self) -> Any:
        """The caller's result, in the thread that waits; its later work on the GPU comes after `done`."""
        if self.done is not None:
            followers = {each.current_stream: each for each in self.outputs if isinstance(each, GpuBuffer)}
            for each in followers.values():  # one of each library
                each.follow(self.done)
        return self.finish(self)

    def fail(self, error: Exception) -> None:
        """Fail the handle with `error`."""
        self._end(_nothing, error)

    def _end(self, result: Callable[[], Any], error: Exception | None = None) -> None:
        """Leave `in_flight`, and drop the handle, since a reference cycle would be left to the garbage collector."""
        self.in_flight.pop(self.key, None)
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.end(result, error)
