"""Short known operations in the caller's thread: each is one call of the compiled module, on one host.

What an operation needs is learned when one like it has gone the usual way. The protocol is the usual one: the rank
counts the operation, the leader schedules what all have counted, each follows the schedule. So a rank that goes this
way works with ranks that do not, and the order stays the leader's alone. Nothing is taken back: what others are late
for is from then on a submission that was counted, or one that runs; so errors, stalls and losses are those of
submissions.

Only while nothing else of this rank is under way: then the next entry of the schedule is this operation, or a response.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ringreduce.arrays.buffer import numpy_buffer
from ringreduce.arrays.view import takes, wrong_out
from ringreduce.collectives.compiled import PATIENCE_US
from ringreduce.engine.inbox import Inbox, may_be_interrupted
from ringreduce.engine.negotiation import Negotiation
from ringreduce.engine.submitting import Submitting
from ringreduce.execution import operations
from ringreduce.execution.context import Context
from ringreduce.execution.executor import Executor
from ringreduce.execution.in_slot import Gets, InSlot, in_slot_of_set
from ringreduce.execution.plan import Plan
from ringreduce.execution.signature import Signature, calling_line
from ringreduce.execution.steps import StepRecorder, label
from ringreduce.execution.submission import Handle, Submission
from ringreduce.execution.timeline import Timeline
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.transport.base import Steps

MOST_KNOWN = 1024
DONE, OTHER, LATE, SUMS_LATE = range(4)  # as in kernels/native.c


class Known(NamedTuple):
    """An operation that was learned."""

    arguments: tuple[Any, ...]  # the array's type and shape, and those of the call
    types: list[type]  # of these: 1 and 1.0 are equal, but not both a rank
    plan: Plan
    exchange: Any  # the compiled module's
    fits: InSlot
    shape: tuple[int, ...]  # of the result
    is_numbered: bool  # it is of calls without a name
    told: tuple[Signature, str]  # what a stall report says of it: also the caller's line
    recorded: tuple[str, str, int]  # name, kind and bytes, as a record of steps has them

    @property
    def algorithm(self) -> str:
        """See `Submission.algorithm`."""
        return "shared" if self.recorded[1] == "allreduce" else ""


class Express:
    """One engine's fast path, for the process set of all ranks.

    polling: the lock of the thread that polls;  on_error: called with what has interrupted an operation.
    busy:    executors that have anything to do.
    """

    def __init__(
        self,
        polling: threading.Lock,
        on_error: Callable[[BaseException], object],
        busy: Mapping[Executor, None],
        inbox: Inbox,
        ending: Ending,
        negotiation: Negotiation,
        submitting: Submitting,
        recorder: StepRecorder,
        timeline: Timeline,
    ) -> None:
        self._polling, self._on_error, self._busy = polling, on_error, busy
        self._inbox, self._ending, self._negotiation, self._submitting = inbox, ending, negotiation, submitting
        self._recorder, self._timeline = recorder, timeline
        self._state = negotiation.states[GLOBAL]
        self._group = self._state.negotiator.compiled
        self._known: dict[Hashable, Known] = {}

    def learn(self, kind: str, name: str | None, array: Any, arguments: tuple[Any, ...], handle: Handle) -> None:
        """Learn from a finished operation to run those of its name, or of its kind without one, and these arguments.

        array: None for an operation that has none.
        """
        if self._group is None or not isinstance(handle, Submission):
            return
        key: Hashable = (kind,) if name is None else name
        plan, known = handle.plan, self._known.get(key)
        arguments = (array.dtype, array.shape, *arguments) if array is not None else arguments
        if known is not None and known.plan is plan and known.arguments == arguments:
            return
        fits = in_slot_of_set(handle, self._state.executor.context)
        if fits is None or (fits.reduction is not None and fits.reduction.size != fits.region.size):
            return
        if fits.gets is Gets.IN_CHUNKS and array.nbytes > fits.region.piece_bytes:  # it takes more than one slot
            return
        shape = handle.outputs[0].shape if handle.outputs else ()
        if fits.gets is Gets.BY_ROWS and shape[0] != fits.where * fits.region.size:
            return
        exchange = fits.compiled(fits.region, 0)
        if exchange is not None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            types, signature = [*map(type, arguments)], handle.signature
            nbytes = sum(each.nbytes for each in handle.inputs or handle.outputs)
            told, recorded = (signature, handle.line), (label(signature, GLOBAL), signature.kind, nbytes)
            self._known[key] = Known(arguments, types, plan, exchange, fits, shape, signature.numbered, told, recorded)

    def run(self, kind: str, name: str | None, source: Any, target: Any, arguments: tuple[Any, ...]) -> Any:
        """Run an operation and wait for it; returns the target, or None when it must be submitted.

        target: None for a new array, of the result's shape and the source's type; also where there is no result.
        """
        if name is not None and type(name) is not str:
            return None
        known = self._known.get((kind,) if name is None else name)
        if known is None:
            return None
        if source is not None:
            arguments = source.dtype, source.shape, *arguments
        try:
            if known.arguments != arguments or known.types != [*map(type, arguments)]:
                return None
        except ValueError:  # an array of several elements, where a number is expected
            return None
        if may_be_interrupted() or not self._polling.acquire(blocking=False):
            return None
        state, plan = self._state, known.plan
        since_s = time.monotonic() if self._recorder.recording else None
        try:
            number = plan.id
            with self._inbox.lock:  # what another thread submits from now on comes after this
                if number is None or state.pending or not self._is_idle():
                    return None
                state.express = plan.key
            is_given = target is not None
            if target is None:
                target = True if source is None else np.empty(known.shape, source.dtype)
            elif target is not source and not takes(target, source, known.shape):
                return None
            try:
                found = known.exchange.run(source, target, number, known.fits.region.sequence, PATIENCE_US, self._group)
            except (BufferError, ValueError):  # not contiguous, or read-only: nothing was counted
                return None
            self._negotiation.known_submissions += 1  # as each that is counted
            self._submitting.count += 1
            if found in (DONE, SUMS_LATE):  # and scheduled
                state.followed += 1
                if (coordinator := state.negotiator.coordinator) is not None:
                    coordinator.ids.use([number])
            if found == DONE:
                known.fits.region.sequence += known.fits.gets is not Gets.NOTHING
                plan.submitted += 1
                state.submitted += known.is_numbered
                self._inbox.last = *known.told, time.monotonic()
                if since_s is not None:
                    self._recorder.passed(*known.recorded, since_s, known.algorithm)
                return target
            made = self._hand_over(known, number, found, source, target, since_s)
        except BaseException as exc:
            self._on_error(exc)
            raise
        finally:
            state.express = ""
            self._polling.release()
        made.wait()
        if known.fits.gets is Gets.BY_ROWS and made.outputs[0].shape != target.shape:  # others have other rows
            if is_given:
                raise wrong_out(kind, target, made.outputs[0])
            return made.outputs[0].array()
        return target

    def _is_idle(self) -> bool:
        """True while nothing else is under way, and nobody looks at what is submitted; with the inbox's lock held."""
        state, ending, submitting = self._state, self._ending, self._submitting
        if state.joined or state.closed or ending.error is not None or ending.leaving:
            return False
        if self._busy or self._inbox.holds_any() or self._inbox.refusals:
            return False
        if submitting.inspectors or submitting.owed > 0:
            return False
        if self._timeline.recording or self._negotiation.logs:
            return False
        return state.negotiator.is_idle

    def _hand_over(
        self, known: Known, number: int, found: int, source: Any, target: Any, since_s: float | None
    ) -> Submission:
        """What others are late for, as the submission that it would be without this path.

        since_s: when the caller began to wait, where steps are recorded.
        """
        plan, state, inbox = known.plan, self._state, self._inbox
        inputs, outputs = ([] if source is None else [numpy_buffer(each, False)] for each in (source, target))
        own = plan, inbox.wait, inbox.on_poll
        with inbox.lock:
            signature = state.numbered(plan.signature) if known.is_numbered else plan.signature
            made = Submission(signature, GLOBAL, inputs, outputs, lambda _: None, None, calling_line(3), True, *own)
            made.rank, made.step = self._submitting.rank, self._submitting.step_of(plan)
            if since_s is not None:
                made.recorder, made.submitted_s = self._recorder, since_s
                self._recorder.waited(known.recorded[0], since_s)
            if known.fits.reduction is not None:
                made.divisor = known.fits.reduction.size
            plan.submitted += 1
            if found == SUMS_LATE:
                made.algorithm = known.algorithm
                made.begin(state.running)
            else:
                state.pending[made.key] = made
                state.negotiator.counted(number, made)
            inbox.took(made)
        if found == SUMS_LATE:
            state.executor.enqueue(_rest(made, known.fits, state.executor.context))
        return made


def _rest(submission: Submission, fits: InSlot, context: Context) -> Steps[None]:
    """The rest of an operation that this rank has packed."""
    if not (yield from operations.through_slot(submission, fits, context, is_packed=True)):
        yield from operations.gather_rows(submission, context)
