"""How the user's threads submit operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.gpu_buffer import ready
from ringreduce.engine.channels import Channels
from ringreduce.engine.inbox import Inbox
from ringreduce.execution.channel import ORDERED
from ringreduce.execution.signature import Signature, calling_line
from ringreduce.execution.submission import Handle, Submission
from ringreduce.gpu.runtime import Event
from ringreduce.gpu.stream import Gpu
from ringreduce.negotiation import errors_for
from ringreduce.negotiation.negotiation import GLOBAL, JOIN, Negotiation
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.world import World


class Submitting:
    """Checks submissions and puts them into the inbox.  sets: the members of all process sets."""

    def __init__(
        self,
        world: World,
        inbox: Inbox,
        negotiation: Negotiation,
        channels: Channels,
        sets: Mapping[int, tuple[int, ...]],
        gpu: Gpu,
    ) -> None:
        self.count = 0  # of all submissions
        self._world, self._inbox, self._negotiation, self._channels = world, inbox, negotiation, channels
        self._sets, self._gpu = sets, gpu

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
    ) -> Handle:
        """Submit an operation; returns at once.

        sign:   makes the signature from the name; a submission without a name gets a numbered one.
        finish: makes the caller's result from the finished submission, in the thread that waits.
        waits:  True: the caller will wait for it before it does anything else.
        line:   the user's calling line, where the caller knows it.

        Raises: InputError when the name is pending already, or this rank is not in the process set; PeerLostError when
                a rank has left.
        """
        if line is None:
            line = calling_line()
        if process_set < GLOBAL:
            channel = self._channels.of.get(process_set)
            if channel is None:
                raise errors_for.unknown_set(kind, process_set, self._channels.members, self._world.rank)
            return channel.submit(
                Submission(sign(ORDERED), process_set, inputs, outputs, finish, payload, line, None, waits)
            )
        marks: Sequence[Event] = ()
        if any(each.on_gpu for each in inputs):
            self._gpu.check(inputs)
            marks = ready(inputs)
        with self._inbox.lock:
            state = self._negotiation.states.get(process_set)
            if state is None:
                raise errors_for.unknown_set(kind, process_set, self._sets, self._world.rank)
            if name is None:
                state.submitted += 1
                signature = sign("noname")._replace(name=f"noname.{state.submitted}", numbered=True)
            else:
                signature = sign(name)
            handle = Handle(signature, self._inbox.wait, self._inbox.on_poll)
            submission = Submission(
                signature, process_set, inputs, outputs, finish, payload, line, handle, waits, marks
            )
            self._check(state, submission)
            state.pending[submission.key] = submission
            if kind == JOIN:
                state.joined = True
            self._inbox.put(submission)
            self.count += 1
        self._inbox.announce_soon(waits)
        return handle

    def _check(self, state: ProcessSetState, submission: Submission) -> None:
        """Raise an error for a submission that cannot be accepted."""
        error, leaving = self._negotiation.error, self._negotiation.leaving
        if error is not None or leaving:
            why = str(error or f"rank {self._world.rank} is leaving the job: {leaving}")
            raise errors_for.engine_closed(submission, why)
        if state.closed:
            raise errors_for.never_complete(state, submission, self._world, leaving)
        if state.joined:
            raise errors_for.after_join(submission)
        if submission.key in state.pending or submission.key in state.running:
            raise errors_for.name_is_pending(submission, self._world.rank)
