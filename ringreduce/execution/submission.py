"""One submission of this rank: its tensors, its operation, and, for the caller, its handle."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import ElementType
from ringreduce.collectives.ops import Reduction
from ringreduce.errors import StalledError
from ringreduce.execution.plan import Plan
from ringreduce.execution.signature import Signature
from ringreduce.execution.steps import StepRecorder

if TYPE_CHECKING:
    import typing_extensions

    Result = typing_extensions.TypeVar("Result", default=Any)
else:
    Result = TypeVar("Result")
Made = TypeVar("Made")

_MAKING_GATES = threading.Lock()


def _nothing(*_: Any) -> None:
    return None


class Handle(Generic[Result]):
    """An asynchronous operation. `poll(handle)` is True when it is done, `synchronize(handle)` returns its result."""

    signature: Signature
    process_set = 0
    rank = "this rank"  # such as rank 1 of 8, in messages
    line = ""  # of the user's script
    ended = False
    recorder: StepRecorder | None = None  # while steps are recorded
    _error: BaseException | None = None
    _gate: threading.Lock | None = None  # held until the end, if a thread waits: most handles are done before
    _on_wait: Callable[[Handle, float], None] = staticmethod(_nothing)
    _on_poll: Callable[[], object] = staticmethod(_nothing)
    _makers: tuple[Callable[[Any], Any], ...] = ()

    def mapped(self, make: Callable[[Result], Made]) -> Handle[Made]:
        """Make `make(result)` the result, computed in the thread that waits; returns this handle."""
        self._makers = *self._makers, make
        return self  # type: ignore[return-value]

    def done(self) -> bool:
        """True when `wait` would return or raise at once."""
        return self.ended

    def poll(self) -> bool:
        """Like `done`, but makes the engine stop batching."""
        if not self.ended:
            self._on_poll()
        return self.ended

    def wait(self, timeout_s: float = -1) -> Result:
        """Wait for the operation, and return its result; raises its error, or StalledError after a timeout >= 0."""
        if not self.ended_within(timeout_s):
            where = f"{self.rank}, {self.signature.text} ({self.line})"
            raise StalledError(f"{where}: Timed out after {timeout_s:g} s; other ranks may not have called it")
        if self._error is not None:
            raise _copied(self._error)
        result: Result = self._result()
        for make in self._makers:
            result = make(result)
        return result

    __call__ = wait  # Horovod's sparse_allreduce_async returns a function

    def ended_within(self, timeout_s: float) -> bool:
        """Wait for its end; False when that has not come after a timeout >= 0."""
        if not self.ended:
            self._on_wait(self, timeout_s)
        return self.ended

    @property
    def failed(self) -> bool:
        """True when it has ended with an error."""
        return self._error is not None

    def _result(self) -> Any:
        """The operation's result, in the thread that waits."""
        raise NotImplementedError

    def block(self, timeout_s: float = -1) -> None:
        """Return when the operation is complete or has failed, or after a timeout >= 0."""
        with _MAKING_GATES:
            if self._gate is None:
                gate = threading.Lock()
                gate.acquire()  # first: from the next line on the engine may release it
                self._gate = gate
        if not self.ended and self._gate.acquire(timeout=timeout_s):  # `_end` looks at them in the other order
            self._gate.release()

    def __repr__(self) -> str:
        return f"<Handle of {self.signature.text}, {'done' if self.ended else 'pending'}>"


class Ended(Handle[Result]):
    """A handle of what ended before anybody could wait: the result is there."""

    ended = True

    def __init__(self, result: Result) -> None:
        self._value = result

    def _result(self) -> Result:
        return self._value


def _copied(error: BaseException) -> BaseException:
    """One per waiter: a traceback belongs to one raise. All have the cause, with its own."""
    try:
        copied = copy.copy(error)
    except Exception:  # a user's class, which is not made of its `args`
        return error
    if error.__cause__ is not None:
        copied.__cause__ = error.__cause__
    return copied


class Submission(Handle):
    """An operation as the engine knows it; a group's has many tensors. One is made for each tensor of each step."""

    ready: Sequence[Any] = ()  # events of the caller's streams, after which inputs on a GPU may be read; see Gpu.begin
    missing_pieces = 1  # the planning itself
    is_refused = False  # it stands for a call that this rank has refused: see Submitting.refuse
    ready_s = begun_s = 0.0  # see StepRecorder
    algorithm = ""
    divisor = 1  # of an Average: the set's size, or the number of its live ranks
    reduced: Any = None  # the finished elements, where they came with what the ranks have agreed on
    deadline_s = math.inf  # when it must be over; for operations of channels only
    step = -1
    """How many steps its rank had taken before the one that it is of; -1: it is not known to be of a step."""
    retire: Callable[[Submission], Callable[[], object]] | None = None
    """Of arrays on a GPU: called at the end; returns what the thread that waits calls before it uses the outputs."""
    _follow: Callable[[], object] | None = None
    in_flight: dict[str, Submission] = {}  # noqa: RUF012 - `begin` replaces it
    """The running submissions of its process set; it is removed before its waiter may submit the name again."""

    def __init__(
        self,
        signature: Signature,
        process_set: int,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer],
        finish: Callable[[Submission], Any],
        payload: Any,
        line: str,
        waits: bool,
        plan: Plan | None = None,
        on_wait: Callable[[Handle, float], None] = _nothing,
        on_poll: Callable[[], object] = _nothing,
        then: Callable[[BaseException | None], object] | None = None,
    ) -> None:
        self.signature = signature
        self.plan = Plan(signature) if plan is None else plan
        self.key = self.plan.key if self.plan.signature is signature else signature.key
        self.process_set = process_set
        self.inputs = inputs
        self.outputs = outputs  # the inputs themselves for an operation in place
        self.finish = finish  # makes the caller's result; called by the thread that waits
        self.payload = payload  # further arguments or results: splits, pickled bytes, a flag
        self.line = line
        self.waits = waits
        self.then = () if then is None else (then,)
        """Called by the thread that polls (engine/polling.py) just before the end; must not wait. What one raises is
        this rank's error of this operation; the engine, and the other ranks, continue."""
        self.submitted_s = time.monotonic()
        self._on_wait, self._on_poll = on_wait, on_poll

    def begin(self, in_flight: dict[str, Submission]) -> None:
        """Add it to the running submissions. Other threads read these at once, as list(in_flight.values())."""
        self.in_flight = in_flight
        in_flight[self.key] = self

    def add_then(self, then: Callable[[BaseException | None], object]) -> None:
        """Also call this, after what is there already."""
        self.then = *self.then, then

    def reduction(self, element: ElementType) -> Reduction:
        """Its reduction, for this element type, without a `wire`: see Algorithms.wire."""
        return self.plan.reduction(element, self.divisor)

    def complete(self) -> None:
        """End it: the outputs hold the results, or will when the GPU has done the engine's work."""
        if self.retire is not None:
            self._follow = self.retire(self)
        self._end()

    def follow(self) -> None:
        """When it is over: let the calling thread's later work on the GPU come after the engine's."""
        if self._follow is not None:
            self._follow()

    def _result(self) -> Any:
        """See `Handle`."""
        if self._follow is not None:
            self._follow()
        return self.finish(self)

    def fail(self, error: Exception) -> None:
        """End it with `error`."""
        self._end(error)

    def _end(self, error: Exception | None = None) -> None:
        """Let `wait` return or raise. What has failed may end again, which changes nothing."""
        if self.ended:
            return
        self.in_flight.pop(self.key, None)
        self._error, interruption = error, None
        thens, self.then = self.then, ()  # which may refer to this handle
        if self.recorder is not None:
            thens = *thens, self._record
        try:
            for then in thens:
                try:
                    then(self._error)
                except BaseException as exc:
                    self._error = exc if self._error is None else self._error
                    interruption = None if isinstance(exc, Exception) else exc
        finally:  # nobody else knows it any more, and whoever waits for it must not wait for ever
            self.ended = True
            if self._gate is not None:
                self._gate.release()
        if interruption is not None:
            raise interruption

    def _record(self, error: BaseException | None) -> None:
        if self.recorder is not None and error is None:
            self.recorder.ended(self)
