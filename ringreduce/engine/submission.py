"""One submission on this rank: its tensors, what is to be done, and the handle by which its result is had."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.buffers import Buffer, GpuBuffer
from ringreduce.engine.signature import Signature
from ringreduce.gpu.runtime import Event


def _nothing() -> None:
    return None


class Handle:
    """An operation under way. `poll(handle)` tells whether it is done, `synchronize(handle)` gives its result."""

    __slots__ = ("__weakref__", "_asking", "_done", "_error", "_gate", "_result", "_waiting", "signature")

    def __init__(
        self, signature: Signature, waiting: Callable[[Handle], None], asking: Callable[[], None] = _nothing
    ) -> None:
        self.signature = signature
        self._waiting = waiting
        self._asking = asking
        self._done = False
        self._gate = gate = threading.Lock()  # an Event takes ten times as long to make
        gate.acquire()
        self._error: Exception | None = None
        self._result: Callable[[], Any] = _nothing

    def done(self) -> bool:
        """True when `wait` would return or raise at once."""
        return self._done

    def poll(self) -> bool:
        """As `done`; the engine learns that somebody is interested."""
        if not self._done:
            self._asking()
        return self._done

    def wait(self) -> Any:
        """Return the result when the operation is done; raises what went wrong."""
        if not self._done:
            self._waiting(self)
        if self._error is not None:
            # each waiter gets an exception of its own: a traceback belongs to one raise
            raise copy.copy(self._error)
        return self._result()

    def block(self) -> None:
        """Return when the operation is done, well or not."""
        with self._gate:
            return

    def complete(self, result: Callable[[], Any]) -> None:
        """Let `wait` return `result()`; called by the engine, once."""
        self._result, self._done = result, True
        self._gate.release()

    def fail(self, error: Exception) -> None:
        """Let `wait` raise `error`; called by the engine, once."""
        self._error, self._done = error, True
        self._gate.release()

    def __repr__(self) -> str:
        return f"<Handle of {self.signature.kind} {self.signature.name!r}, {'done' if self.done() else 'pending'}>"


_NOWHERE: dict[str, Any] = {}
_NO_LOCK = threading.Lock()


class Submission:
    """What this rank submitted under one name; a group has many tensors."""

    __slots__ = (
        "__weakref__",
        "finish",
        "handle",
        "in_flight",
        "inputs",
        "key",
        "line",
        "lock",
        "missing_pieces",
        "outputs",
        "payload",
        "process_set",
        "ready",
        "retire",
        "signature",
        "submitted_s",
        "waits",
    )

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
        self.outputs = outputs
        """Where the results go: the inputs themselves for an operation in place."""
        self.finish = finish
        """Makes the caller's result; runs in the thread that waits."""
        self.payload = payload
        """What else the operation needs or gives: splits, pickled bytes, a flag."""
        self.line = line
        self.handle = handle
        """None on a rank that has joined and takes part with neutral elements."""
        self.waits = waits
        self.ready = ready
        """Points of the caller's streams, behind which the inputs on a GPU may be read."""
        self.submitted_s = time.monotonic()
        self.missing_pieces = 0
        self.retire: Callable[[Sequence[Buffer]], Event] | None = None
        """For GPU memory: keeps it until the GPU is done, which the event tells; see Gpu.retire."""
        self.in_flight: dict[str, Submission] = _NOWHERE
        """The submissions under way of its process set, which it leaves before its waiter may submit the name again."""
        self.lock = _NO_LOCK
        """Guards those."""

    def begin(self, in_flight: dict[str, Submission], lock: threading.Lock) -> None:
        """It is under way from now on; with `lock` held."""
        self.in_flight, self.lock = in_flight, lock
        in_flight[self.key] = self

    def complete(self) -> None:
        """The outputs hold the results, or those on a GPU will when it has done what the engine has queued."""
        done = self.retire([*self.inputs, *self.outputs]) if self.retire is not None else None
        handle = self._leave()
        if handle is not None:
            handle.complete(lambda: self._result(done))

    def _result(self, done: Event | None) -> Any:
        """The caller's result, in the thread that waits; what it queues on its GPU from now on comes after `done`."""
        if done is not None:
            followers = {each.current_stream: each for each in self.outputs if isinstance(each, GpuBuffer)}
            for each in followers.values():  # one of each library
                each.follow(done)
        return self.finish(self)

    def fail(self, error: Exception) -> None:
        """The operation did not happen, or not to its end."""
        handle = self._leave()
        if handle is not None:
            handle.fail(error)

    def _leave(self) -> Handle | None:
        """Leave the submissions under way, and the handle: the two in a circle would be garbage for the collector."""
        with self.lock:
            self.in_flight.pop(self.key, None)
        handle, self.handle = self.handle, None
        return handle
