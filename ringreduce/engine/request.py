"""One submission on this rank: its tensors, what is to be done, and the handle by which its result is had."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.buffers import Buffer
from ringreduce.engine.description import Description


def _nothing() -> None:
    return None


class Handle:
    """An operation under way. `poll(handle)` tells whether it is done, `synchronize(handle)` gives its result."""

    __slots__ = ("__weakref__", "_done", "_error", "_gate", "_result", "_waiting", "description")

    def __init__(self, description: Description, waiting: Callable[[Handle], None]) -> None:
        self.description = description
        self._waiting = waiting
        self._done = False
        self._gate = gate = threading.Lock()  # an Event takes ten times as long to make
        gate.acquire()
        self._error: Exception | None = None
        self._result: Callable[[], Any] = _nothing

    def done(self) -> bool:
        """True when `wait` would return or raise at once."""
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
        self._result = result
        self._finish()

    def fail(self, error: Exception) -> None:
        """Let `wait` raise `error`; called by the engine, once."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self._done = True
        self._gate.release()

    def __repr__(self) -> str:
        return f"<Handle of {self.description.kind} {self.description.name!r}, {'done' if self.done() else 'pending'}>"


_NOWHERE: dict[str, Any] = {}


class Request:
    """What this rank submitted under one name; a group has many tensors."""

    __slots__ = (
        "__weakref__",
        "among",
        "description",
        "finish",
        "handle",
        "inputs",
        "key",
        "line",
        "missing_pieces",
        "outputs",
        "payload",
        "process_set",
        "submitted_s",
        "waits",
    )

    def __init__(
        self,
        description: Description,
        process_set: int,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        finish: Callable[[Request], Any],
        payload: Any,
        line: str,
        handle: Handle | None,
        waits: bool,
    ) -> None:
        self.description = description
        self.key = description.key
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
        self.submitted_s = time.monotonic()
        self.missing_pieces = 0
        self.among: dict[str, Request] = _NOWHERE
        """The requests under way of its process set, which it leaves before its waiter may submit the name again."""

    def complete(self) -> None:
        """The outputs hold the results."""
        for each in self.outputs:
            each.settle()
        handle = self._leave()
        if handle is not None:
            handle.complete(lambda: self.finish(self))

    def fail(self, error: Exception) -> None:
        """The operation did not happen, or not to its end."""
        handle = self._leave()
        if handle is not None:
            handle.fail(error)

    def _leave(self) -> Handle | None:
        """Leave the requests under way, and the handle: the two in a circle would be garbage for the collector."""
        self.among.pop(self.key, None)
        handle, self.handle = self.handle, None
        return handle
