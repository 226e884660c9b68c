"""Short known operations in the caller's thread: each is one call of the compiled module, where a set is on one host.

The protocol is the usual one: the rank counts the operation, the leader schedules what all have counted, each follows
the schedule. So a rank that goes this way works with ranks that do not, and the order stays the leader's alone. Nothing
is taken back: what others are late for is from then on a submission that was counted, or one that runs; so errors,
stalls and losses are those of submissions.

Only while nothing else of this rank is under way: then the next entry of the schedule is this operation, or a response.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ringreduce.arrays.buffer import numpy_buffer
from ringreduce.arrays.view import takes, wrong_out
from ringreduce.collectives.compiled import PATIENCE_US
from ringreduce.collectives.overlap import until_ended
from ringreduce.engine.inbox import Inbox, may_be_interrupted
from ringreduce.engine.negotiation import Negotiation
from ringreduce.engine.submitting import Submitting
from ringreduce.execution import operations
from ringreduce.execution.context import Context
from ringreduce.execution.executor import Executor
from ringreduce.execution.in_slot import Gets, InSlot
from ringreduce.execution.program import Program, Programs, program_of
from ringreduce.execution.signature import calling_line
from ringreduce.execution.steps import StepRecorder
from ringreduce.execution.submission import Submission
from ringreduce.execution.timeline import Timeline
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.transport.base import Steps, Task

DONE, OTHER, LATE, SUMS_LATE = range(4)  # as in kernels/native.c


class Express:
    """One engine's fast path.

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
        self.programs = Programs(self._program_of)

    def _program_of(self, submission: Submission) -> Program | None:
        state = self._negotiation.states.get(submission.process_set)  # None: removed meanwhile
        if state is None or state.negotiator.compiled is None:
            return None
        program = program_of(submission, state.executor.context)
        if program is not None:
            program.state = state
        return program

    def run(self, program: Program, source: Any, target: Any) -> Any:
        """Run an operation and wait for it; returns the target, or None when it must be submitted.

        target: None for a new array, of the result's shape and the source's type; also where there is no result.
        """
        if may_be_interrupted() or not self._polling.acquire(False):
            return None
        state, plan = program.state, program.plan
        since_s = time.monotonic() if self._recorder.recording else None
        try:
            number = plan.id
            with self._inbox.lock:  # what another thread submits from now on comes after this
                if number is None or state.pending or not self._is_idle(state):
                    return None
                state.express = plan.key
            is_given, region = target is not None, program.region
            if target is None:
                target = True if source is None else np.empty(program.shape, source.dtype)
            elif target is not source and not takes(target, source, program.shape):
                return None
            try:
                begin = program.pieces(source, target) if program.in_pieces else None
                found = program.run(source, target, number, region.sequence, PATIENCE_US, state.negotiator.compiled)
            except (BufferError, ValueError):  # not contiguous, or read-only: nothing was counted
                return None
            self._negotiation.known_submissions += 1  # as each that is counted
            self._submitting.count += 1
            if found in (DONE, SUMS_LATE):  # and scheduled
                state.followed += 1
                if (coordinator := state.negotiator.coordinator) is not None:
                    coordinator.ids.use([number])
            rest = begin() if begin is not None and found == DONE else None
            if rest is not None and not rest.ended_soon():
                found = SUMS_LATE
            if found == DONE:
                region.sequence += program.slots
                plan.submitted += 1
                state.submitted += program.told[0].numbered
                self._inbox.last = *program.told, time.monotonic()
                if since_s is not None:
                    self._recorder.passed(*program.recorded, since_s, program.algorithm)
                return target
            made = self._hand_over(program, number, found, source, target, since_s, rest)
        except BaseException as exc:
            self._on_error(exc)
            raise
        finally:
            state.express = ""
            self._polling.release()
        made.wait()
        if program.fits.gets is Gets.BY_ROWS and made.outputs[0].shape != target.shape:  # others have other rows
            if is_given:
                raise wrong_out(program.recorded[1], target, made.outputs[0])
            return made.outputs[0].array()
        return target

    def _is_idle(self, state: ProcessSetState) -> bool:
        """True while nothing else is under way, and nobody looks at what is submitted; with the inbox's lock held."""
        ending, submitting = self._ending, self._submitting
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
        self,
        program: Program,
        number: int,
        found: int,
        source: Any,
        target: Any,
        since_s: float | None,
        rest: Task[None] | None,
    ) -> Submission:
        """What others are late for, as the submission that it would be without this path.

        since_s: when the caller began to wait, where steps are recorded.
        rest:    of pieces that have begun.
        """
        plan, state, inbox = program.plan, program.state, self._inbox
        inputs, outputs = ([] if source is None else [numpy_buffer(each, False)] for each in (source, target))
        own = state.number, inputs, outputs
        with inbox.lock:
            signature = state.numbered(plan.signature) if program.told[0].numbered else plan.signature
            ends = plan, inbox.wait, inbox.on_poll
            made = Submission(signature, *own, lambda _: None, None, calling_line(3), True, *ends)
            made.rank, made.step = self._submitting.rank, self._submitting.step_of(plan)
            if since_s is not None:
                made.recorder, made.submitted_s = self._recorder, since_s
                self._recorder.waited(program.recorded[0], since_s)
            if program.fits.reduction is not None:
                made.divisor = program.fits.reduction.size
            plan.submitted += 1
            if found == SUMS_LATE:
                made.algorithm = program.algorithm
                made.begin(state.running)
            else:
                state.pending[made.key] = made
                state.negotiator.counted(number, made)
            inbox.took(made)
        if found == SUMS_LATE:
            state.executor.enqueue(_rest(made, program.fits, state.executor.context, rest))
        return made


def _rest(submission: Submission, fits: InSlot, context: Context, pieces: Task[None] | None) -> Steps[None]:
    """The rest of an operation that this rank has packed, or of one whose pieces have begun."""
    if pieces is not None:
        yield from until_ended(pieces, ())
        submission.complete()
    elif not (yield from operations.through_slot(submission, fits, context, is_packed=True)):
        yield from operations.gather_rows(submission, context)
