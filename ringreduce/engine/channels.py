"""The channels of one engine (execution/channel.py): opens and closes them. Nothing in them is negotiated."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from ringreduce.collectives import fusion
from ringreduce.engine.inbox import Inbox
from ringreduce.execution import errors_for
from ringreduce.execution.algorithms import Algorithms
from ringreduce.execution.allreduce import allreduce
from ringreduce.execution.channel import Channel
from ringreduce.execution.context import Context, Operation
from ringreduce.execution.host import HostResources, Resources
from ringreduce.execution.opening import before_opening
from ringreduce.execution.operations import alltoall
from ringreduce.execution.signature import Signature, calling_line
from ringreduce.execution.submission import Handle, Submission
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.transport.world import World

IN_ORDER: Mapping[str, Operation] = {"reduce": allreduce, "gather": alltoall, "scatter": alltoall}
FIRST_OWN = -(1 << 32)  # the number of the first channel that its members open alone
CHECK_S = 0.05
LAST_MESSAGES_S = 1.0  # how long a channel's operations may take that a rank had done before it left


class Channels:
    """One engine's channels. Numbers are negative: -1, -2, ... if all ranks open them, else from FIRST_OWN down."""

    def __init__(
        self,
        world: World,
        host: HostResources,
        inbox: Inbox,
        ending: Ending,
        states: Mapping[int, ProcessSetState],
        make_context: Callable[..., Context],
        sweep: Callable[[], object],
    ) -> None:
        """states: of process sets;  make_context: as Context(algorithms, members, operations=...).

        sweep: called now and then.
        """
        self.by_number: dict[int, Channel] = {}  # this rank's
        self.members: dict[int, tuple[int, ...]] = {}  # also of those without this rank
        self.bases: dict[int, int] = {}  # the process set of each that all ranks have opened
        self._world, self._host, self._inbox, self._ending = world, host, inbox, ending
        self._states, self._make_context, self._sweep = states, make_context, sweep
        self._next = -1
        self._own_numbers = itertools.count(FIRST_OWN, -1)
        self._next_check_s = 0.0

    def add(self, base: int, members: tuple[int, ...], resources: Resources, patient: bool) -> int:
        """Add a channel of a process set; all ranks of the world do so in the same order. Returns its number."""
        number, channel = self._next, None
        if self._world.rank in members:
            context = self._context(self._host.algorithms(resources, members), members, IN_ORDER)
            channel = Channel(number, base, context, self._world, self._host.signatures(resources, members))
            channel.patient = patient
        with self._inbox.lock:
            self._next, self.members[number], self.bases[number] = number - 1, members, base
            if channel is not None:
                self.by_number[number] = channel
        return number

    def forget(self, number: int) -> None:
        """Forget a channel that was closed with its process set; with the inbox's lock held."""
        self.by_number.pop(number, None)
        self.members.pop(number, None)
        self.bases.pop(number, None)

    def _context(self, algorithms: Algorithms, members: Sequence[int], operations: Mapping[str, Operation]) -> Context:
        """The context of a channel, with its own memory."""
        settings = self._host.settings
        fusion_buffer = fusion.FusionBuffer(settings.fusion_buffer_bytes // 2, settings.fusion_slot_bytes)
        return self._make_context(algorithms, tuple(members), operations=operations, fusion_buffer=fusion_buffer)

    # Those that their members open alone; called by any thread

    def open(self, members: Sequence[int], name: str, operations: Mapping[str, Operation]) -> tuple[int, Handle]:
        """Begin to open a channel; no rank but the members takes part, and each opens one at a time.

        members: ranks of the world, by rank in the channel;  name: in messages;  operations: see Context.
        Returns: its number, which other ranks do not know, and the handle to wait for.
        Raises:  CollectiveError when the engine has failed, and so does the handle.
        """
        number, inbox, ending = next(self._own_numbers), self._inbox, self._ending
        signature = Signature("open", name, details=(("ranks", tuple(members)),))
        line = calling_line()
        submission = Submission(
            signature, number, (), (), lambda _: None, None, line, True, None, inbox.wait, inbox.on_poll
        )

        def begin() -> None:
            context = self._context(before_opening(self._host, members), members, operations)
            channel = Channel(number, GLOBAL, context, self._world, name=name)
            with inbox.lock:
                self.members[number], self.by_number[number] = context.members, channel
            if ending.error is None:
                channel.open(submission, self._host)
            else:
                submission.fail(errors_for.engine_closed(submission, str(ending.error), ending.error))

        if ending.error is not None:  # the engine's thread may have ended
            raise errors_for.engine_closed(submission, str(ending.error), ending.error)
        inbox.call_soon(begin)
        return number, submission

    def shut(self, number: int) -> None:
        """Close a channel that its members opened, on this rank; what is not complete fails."""

        def end() -> None:
            with self._inbox.lock:
                channel = self.by_number.pop(number)
                del self.members[number]
            self._ending.close(channel, "its process group was destroyed", -1)

        self._inbox.call_soon(end)

    # The service

    def poll(self) -> bool:
        """Occasionally close those whose operations take too long, or whose process set has ended. Returns False."""
        now = time.monotonic()
        if now >= self._next_check_s:
            self._next_check_s = now + CHECK_S
            self._sweep()
            for channel in list(self.by_number.values()):
                self._check(channel, now)
        return False

    def _check(self, channel: Channel, now: float) -> None:
        with self._inbox.lock:
            overdue = channel.overdue(now)
        if overdue:
            self._ending.close(channel, overdue, -1)
        state = self._states[channel.process_set]
        if state.closed and channel.busy and now - channel.stuck().moved_s > LAST_MESSAGES_S:
            self._ending.close(channel, state.closed, state.leaver)
