"""Short named sums in the caller's thread: each one call of the compiled module, on one host.

What an operation needs is learned when one like it has gone the usual way. The protocol is the usual one: the rank
counts the operation, the leader schedules what all have counted, each follows the schedule. So a rank that goes this
way works with ranks that do not, and the order stays the leader's alone. Nothing is taken back: what others are late
for is from then on a submission that was counted, or one that runs; so errors, stalls and losses are those of
submissions.

Only while nothing else of this rank is under way: then the next entry of the schedule is this operation, or a response.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ringreduce.arrays.buffer import numpy_buffer
from ringreduce.collectives.compiled import PATIENCE_US
from ringreduce.collectives.shared import one_shot
from ringreduce.engine.inbox import Inbox, may_be_interrupted
from ringreduce.engine.negotiation import Negotiation
from ringreduce.engine.submitting import Submitting
from ringreduce.execution.executor import Executor
from ringreduce.execution.in_slot import Gets, InSlot
from ringreduce.execution.plan import Plan
from ringreduce.execution.signature import calling_line
from ringreduce.execution.steps import StepRecorder
from ringreduce.execution.submission import Handle, Submission
from ringreduce.execution.timeline import Timeline
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.ops import Reduction
from ringreduce.transport.base import Steps
from ringreduce.transport.window import Region

MOST_KNOWN = 1024
DONE, OTHER, LATE, SUMS_LATE = range(4)  # as in kernels/native.c


class Known(NamedTuple):
    """An operation that was learned."""

    arguments: tuple[Any, ...]  # the array's type and shape, and those of the call
    plan: Plan
    exchange: Any  # the compiled module's
    region: Region
    reduction: Reduction


class Express:
    """One engine's, for the process set of all ranks.

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
        self._known: dict[str, Known] = {}

    def learn(self, name: str | None, array: Any, arguments: tuple[Any, ...], handle: Handle) -> None:
        """Operations of this name and these arguments are as this one, which is over."""
        if self._group is None or name is None or not isinstance(handle, Submission) or handle.plan.way is None:
            return
        plan, region, reduction = handle.plan, self._state.algorithms.shared_region, handle.plan.way.short
        arguments = array.dtype, array.shape, *arguments
        known = self._known.get(name)
        if region is None or reduction is None or reduction.size != region.size:
            return
        if known is not None and known.plan is plan and known.arguments == arguments:
            return
        exchange = InSlot(Gets.REDUCED, region, 0, reduction).compiled(region, 0)
        if exchange is not None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[name] = Known(arguments, plan, exchange, region, reduction)

    def run(self, name: str, source: Any, target: Any, arguments: tuple[Any, ...]) -> Handle | bool:
        """Run it; True when it is done, False when it must be submitted, else what is to be waited for."""
        known = self._known.get(name)
        if known is None or known.arguments != (source.dtype, source.shape, *arguments):
            return False
        if may_be_interrupted() or not self._polling.acquire(blocking=False):
            return False
        state, plan = self._state, known.plan
        try:
            number = plan.id
            with self._inbox.lock:  # what another thread submits from now on comes after this
                if number is None or state.pending or not self._is_idle():
                    return False
                state.express = plan.key
            try:
                at = self._group, number, source, target, known.region.sequence, PATIENCE_US
                found = known.exchange.scheduled(*at)
            except (BufferError, ValueError):  # not contiguous, or read-only: nothing was counted
                return False
            return self._counted(known, number, found) or self._hand_over(known, number, found, source, target)
        except BaseException as exc:
            self._on_error(exc)
            raise
        finally:
            state.express = ""
            self._polling.release()

    def _is_idle(self) -> bool:
        """True while nothing else is under way, and nobody looks at what is submitted; with the inbox's lock held."""
        state, ending, submitting = self._state, self._ending, self._submitting
        if state.joined or state.closed or ending.error is not None or ending.leaving:
            return False
        if self._busy or self._inbox.holds_any() or self._inbox.refusals or submitting.watches or submitting.owed > 0:
            return False
        if self._timeline.recording or self._recorder.recording or self._negotiation.logs:
            return False
        return state.negotiator.is_idle

    def _counted(self, known: Known, number: int, found: int) -> bool:
        """What each operation that was counted changes, and one that is scheduled; True when it is done."""
        state = self._state
        self._negotiation.known_submissions += 1
        self._submitting.count += 1
        if found in (DONE, SUMS_LATE):
            known.region.sequence += 1
            state.followed += 1
            if (coordinator := state.coordinator) is not None:
                coordinator.ids.use([number])
        known.plan.submitted += found == DONE
        return found == DONE

    def _hand_over(self, known: Known, number: int, found: int, source: Any, target: Any) -> Submission:
        """What others are late for, as the submission that it would be if it had not come this way."""
        plan, state, inbox = known.plan, self._state, self._inbox
        inputs, outputs = ([numpy_buffer(each, True)] for each in (source, target))
        own = plan, inbox.wait, inbox.on_poll
        made = Submission(plan.signature, GLOBAL, inputs, outputs, lambda _: None, None, calling_line(3), True, *own)
        made.rank, made.divisor, made.step = self._submitting.rank, known.reduction.size, self._submitting.step_of(plan)
        with inbox.lock:
            plan.submitted += 1
            if found == SUMS_LATE:
                made.begin(state.running)
            else:
                state.pending[made.key] = made
                state.negotiator.counted(number, made)
            inbox.took(made)
        if found == SUMS_LATE:
            state.executor.enqueue(_sum(made, known.region, known.reduction))
        return made


def _sum(submission: Submission, region: Region, reduction: Reduction) -> Steps[None]:
    """What is left of an operation that this rank has packed."""
    packed = region.sequence - 1
    yield from one_shot(submission.inputs[0].flat, submission.outputs[0].flat, region, reduction, packed)
    submission.complete()
