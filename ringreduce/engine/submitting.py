"""How the user's threads submit operations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.gpu_buffer import ready
from ringreduce.engine.inbox import Inbox
from ringreduce.errors import CollectiveError
from ringreduce.execution.channel import Channel
from ringreduce.execution.signature import Signature, calling_line
from ringreduce.execution.submission import Handle, Submission
from ringreduce.gpu.runtime import Event
from ringreduce.gpu.stream import Gpu
from ringreduce.negotiation import errors_for
from ringreduce.negotiation.negotiation import GLOBAL, JOIN, Negotiation
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.world import World

ON_GPU = operator.attrgetter("on_gpu")


class Submitting:
    """Checks submissions and puts them into the inbox.

    sets: the members of all process sets and channels;  gone: of process sets that ended with a lost rank, why.
    """

    def __init__(
        self,
        world: World,
        inbox: Inbox,
        negotiation: Negotiation,
        sets: Mapping[int, tuple[int, ...]],
        gpu: Gpu,
        gone: Mapping[int, str],
    ) -> None:
        self.count = 0  # of all submissions
        self._world, self._inbox, self._negotiation = world, inbox, negotiation
        self._sets, self._gpu, self._gone = sets, gpu, gone
        self._wait, self._poll = inbox.wait, inbox.on_poll

    def submit(
        self,
        kind: str,
        name: str | None,
        process_set: int = GLOBAL,
        *,
        sign: Callable[[str], Signature],
        inputs: Sequence[Buffer] = (),
        outputs: Sequence[Buffer] = (),
        finish: Callable[[Submission], Any] = lambda _: None,
        payload: Any = None,
        waits: bool = False,
        line: str | None = None,
        then: Callable[[Exception | None], object] | None = None,
        timeout_s: float = math.inf,
    ) -> Handle:
        """Submit an operation; returns at once.

        sign:   makes the signature from the name; a submission without a name gets a numbered one.
        finish: makes the caller's result from the finished submission, in the thread that waits.
        waits:  True: the caller will wait for it before it does anything else.
        line:   the user's calling line, where the caller knows it.
        then:   see Submission.
        timeout_s: of an operation in a channel, which is closed when that takes longer.

        Raises: InputError when the name is pending already, or this rank is not in the process set; PeerLostError when
                a rank has left.
        """
        if line is None:
            line = calling_line(3)
        marks: Sequence[Event] = ()
        arrays = inputs if process_set >= GLOBAL else (*inputs, *outputs)  # a channel may write to the caller's
        if any(map(ON_GPU, arrays)):
            self._gpu.check(arrays)
            marks = ready(arrays)
        inbox, negotiation = self._inbox, self._negotiation
        with inbox.lock:
            state = negotiation.states.get(process_set) or negotiation.channels.get(process_set)
            if state is None:
                raise errors_for.unknown_set(kind, process_set, self._sets, self._world.rank, self._gone)
            if isinstance(state, Channel):
                signature = sign(state.name)
            elif name is None:
                state.submitted += 1
                signature = sign("noname")._replace(name=f"noname.{state.submitted}", numbered=True)
            else:
                signature = sign(name)
            submission = Submission(
                signature,
                process_set,
                inputs,
                outputs,
                finish,
                payload,
                line,
                waits,
                marks,
                self._wait,
                self._poll,
                then,
            )
            if negotiation.error is not None or negotiation.leaving or state.closed:
                raise self._closed(state, submission)
            if isinstance(state, Channel):
                submission.deadline_s = submission.submitted_s + timeout_s
                state.enqueue(submission)
                if not waits:
                    inbox.call_soon(lambda: None)
            else:
                key = submission.key
                if state.joined:
                    raise errors_for.after_join(submission)
                if key in state.pending or key in state.running:
                    raise errors_for.name_is_pending(submission, self._world.rank)
                state.pending[key] = submission
                if kind == JOIN:
                    state.joined = True
                inbox.put(submission)
            self.count += 1
        inbox.announce_soon(waits)
        return submission

    def _closed(self, state: ProcessSetState | Channel, submission: Submission) -> CollectiveError:
        """The error for what is submitted when this rank or another one is leaving, or the engine has failed."""
        error, leaving = self._negotiation.error, self._negotiation.leaving
        if error is not None or leaving:
            why = str(error or f"rank {self._world.rank} is leaving the job: {leaving}")
            return errors_for.engine_closed(submission, why, error)
        return errors_for.never_complete(state, submission, self._world, leaving)
