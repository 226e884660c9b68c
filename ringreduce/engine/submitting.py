"""How the user's threads submit operations."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.gpu_buffer import any_on_gpu, ready
from ringreduce.engine.inbox import Inbox
from ringreduce.engine.process_sets import ProcessSets
from ringreduce.errors import CollectiveError, InputError
from ringreduce.execution import errors_for
from ringreduce.execution.channel import Channel
from ringreduce.execution.plan import Plan, Plans
from ringreduce.execution.signature import REFUSED, Signature, calling_line
from ringreduce.execution.steps import StepRecorder
from ringreduce.execution.submission import Handle, Submission
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.protocol import GLOBAL, JOIN
from ringreduce.transport.world import World

LONGEST_REASON = 500  # characters
OF_A_STEP = 16  # elements: of a loss and a few metrics


class Inspector(Protocol):
    """Inspects what is submitted, before it can change: checks/nan.py, resum.py, twice.py."""

    def look(
        self,
        process_set: int,
        name: str | None,
        names: Sequence[str] | None,
        details: Sequence[tuple[str, Any]],
        inputs: Sequence[Buffer],
    ) -> Any:
        """What is found in the arrays; None: there are none to inspect. It may wait for other operations."""

    def begin(self, made: Submission, seen: Any, of_step: bool) -> None:
        """The engine is about to get the submission; with the inbox's lock held."""


def _is_fine(_: Buffer) -> None:
    return None


class Submitting:
    """Checks submissions and puts them into the inbox."""

    def __init__(
        self,
        world: World,
        inbox: Inbox,
        ending: Ending,
        process_sets: ProcessSets,
        check_gpu: Callable[[Sequence[Buffer]], object],
        recorder: StepRecorder,
    ) -> None:
        """check_gpu: raises InputError for arrays on another GPU than this rank's."""
        self.count = 0  # of all submissions
        self.owed = 0  # elements that a rank which trains is yet to share with others
        self.inspectors: Sequence[Inspector] = ()
        self._world, self._inbox, self._ending, self._check_gpu = world, inbox, ending, check_gpu
        self._process_sets, self._states, self._channels = process_sets, process_sets.states, process_sets.channels
        self._on = inbox.wait, inbox.on_poll
        self._plans, self.rank = Plans(), f"rank {world.rank} of {world.size}"
        self._recorder = recorder

    def submit(
        self,
        kind: str,
        name: str | None,
        process_set: int = GLOBAL,
        *,
        details: tuple[tuple[str, Any], ...] = (),
        names: tuple[str, ...] | None = None,
        signed: Sequence[Buffer] | None = None,
        by_rows: bool = False,
        check: Callable[[Buffer], object] = _is_fine,
        together: Callable[[Sequence[Buffer]], object] | None = None,
        inputs: Sequence[Buffer] = (),
        outputs: Sequence[Buffer] = (),
        finish: Callable[[Submission], Any] = lambda _: None,
        payload: Any = None,
        waits: bool = False,
        line: str | None = None,
        then: Callable[[BaseException | None], object] | None = None,
        timeout_s: float = math.inf,
        of_step: bool = False,
    ) -> Handle:
        """Submit an operation; returns at once.

        name:    None: the submission gets a numbered name.
        details: arguments that must be equal on all ranks; names: of a group's tensors, for messages.
        signed:  tensors whose types and shapes must be equal on all ranks, by default the inputs; by_rows: but for
                 their dim 0.
        check:   raises InputError for a tensor that does not fit the kind and the details; together: for all of them.
        finish:  makes the caller's result from the finished submission, in the thread that waits.
        waits:   True: the caller will wait for it before it does anything else.
        line:    the user's calling line, where the caller knows it; then: see Submission.
        timeout_s: of an operation in a channel, which is closed when that takes longer.
        of_step: a torch optimizer steps with what it makes; so a check may wait for that.

        Raises: InputError when the name is no text or already pending, or this rank is not in the process set;
                PeerLostError when a rank has left.
        """
        recorder = self._recorder if self._recorder.recording else None
        # first, so that a submission that is refused leaves it to no later one
        since_s = recorder.passed_s.pop(threading.get_ident(), None) if recorder else None
        if name is not None and not isinstance(name, str):  # here: all might agree, and then fail to keep it
            raise InputError(f"{kind}: name={name!r}; expected text")
        line = calling_line(3) if line is None else line
        tensors = inputs if signed is None else signed
        seen: Sequence[tuple[Inspector, Any]] = ()
        if self.inspectors:
            called = process_set, name, names, details, inputs
            seen = [(each, each.look(*called)) for each in self.inspectors]
        on_gpu = (*inputs, *outputs) if any_on_gpu(inputs, outputs) else ()
        with self._inbox.lock:
            state = self._states.get(process_set) or self._channel(kind, process_set)
            if on_gpu:
                self._check_gpu(on_gpu)
            known_as = state.name if name is None or process_set < GLOBAL else name
            known = tensors, details, names, by_rows, tensors is inputs, check, together
            plan = self._plans.find(process_set, kind, name, known_as, *known)
            signature = plan.signature if name is not None else state.numbered(plan.signature)
            made = Submission(
                signature, process_set, inputs, outputs, finish, payload, line, waits, plan, *self._on, then
            )
            made.deadline_s = made.submitted_s + timeout_s
            made.recorder, made.submitted_s = recorder, since_s or made.submitted_s
            made.rank = self.rank
            if on_gpu:
                made.ready = ready(on_gpu)
            made.step = self.step_of(plan, of_step) if self._recorder.taken else plan.submitted
            plan.submitted += state.counts
            for watch, its in seen:
                if its is not None:
                    watch.begin(made, its, of_step)
            self._hand_over(state, made)
        if not waits:
            self._inbox.announce_soon()
        return made

    def step_of(self, plan: Plan, of_step: bool = False) -> int:
        """See `Submission.step`: of the next submission of this plan."""
        before, taken = plan.submitted, self._recorder.taken
        if not taken:
            return before
        return taken if of_step or (before and before % taken == 0) else -1  # so often in each step

    def refuse(self, kind: str, name: str | None, process_set: int, why: str, line: str) -> None:
        """This rank has refused a call, with an InputError, and may continue; other ranks may wait in theirs.

        A call that is matched by order, in a channel or without a name, keeps its place: something that no rank can run
        stands there, so the others' calls fail at once, with this rank's reason, and later ones meet as they should.
        The reason of a call by name is reported when the others have waited long.
        """
        why = why[:LONGEST_REASON]
        with self._inbox.lock:
            state = self._states.get(process_set) or self._channels.by_number.get(process_set)
            if state is None or self._ending.error is not None or self._ending.leaving or state.closed:
                return
            if isinstance(state, ProcessSetState) and state.joined:
                return
            if name is not None and process_set >= GLOBAL:
                if isinstance(name, str):  # else nobody waits for it
                    self._inbox.refused(name, f"({line}) was refused: {why}")
                return
            mark = state.numbered(Signature(kind, state.name, details=((REFUSED, why),)))
            made = Submission(mark, process_set, (), (), lambda _: None, None, line, False)
            made.is_refused = True
            self._hand_over(state, made)
        self._inbox.announce_soon()

    def _channel(self, kind: str, number: int) -> Channel:
        channel = self._channels.by_number.get(number)
        if channel is None:
            members = self._process_sets.members | self._channels.members
            raise errors_for.unknown_set(kind, number, members, self._world.rank, self._process_sets.gone)
        return channel

    def _hand_over(self, state: ProcessSetState | Channel, submission: Submission) -> None:
        """Hand a submission to the negotiation, or to its channel."""
        if self._ending.error is not None or self._ending.leaving or state.closed:
            raise self._closed(state, submission)
        if isinstance(state, Channel):
            state.enqueue(submission)
            if not submission.waits:
                self._inbox.call_soon(lambda: None)
        else:
            key = submission.key
            if state.joined:
                raise errors_for.after_join(submission)
            if key in state.pending or key in state.running or key == state.express:
                raise errors_for.name_is_pending(submission, self._world.rank)
            state.pending[key] = submission
            state.joined = submission.signature.kind == JOIN
            self._inbox.put(submission)
        self.count += 1
        if self.owed > 0:
            self.owed -= sum(each.count for each in submission.inputs)

    def has_shared_little(self, parameters: int, steps: int) -> bool:
        """Whether no more than losses and metrics were shared since `parameters` were owed: the rank trains alone."""
        return parameters - self.owed < min(parameters, OF_A_STEP * steps)

    def _closed(self, state: ProcessSetState | Channel, submission: Submission) -> CollectiveError:
        """The error for what is submitted when this rank or another one is leaving, or the engine has failed."""
        error, leaving = self._ending.error, self._ending.leaving
        if error is not None or leaving:
            why = str(error or f"rank {self._world.rank} is leaving the job: {leaving}")
            return errors_for.engine_closed(submission, why, error)
        return errors_for.never_complete(state, submission, self._world, leaving)
