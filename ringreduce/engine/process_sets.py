"""The process sets of one engine: adds and removes them, and runs their operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ringreduce import fusion
from ringreduce.collectives import bruck
from ringreduce.engine.inbox import Inbox
from ringreduce.errors import CollectiveError, InputError
from ringreduce.execution.algorithms import Algorithms
from ringreduce.execution.allreduce import allreduce
from ringreduce.execution.channel import Channel
from ringreduce.execution.context import Context, Operation
from ringreduce.execution.executor import Ended, Executor
from ringreduce.execution.host import Host, Resources
from ringreduce.execution.opening import before_opening
from ringreduce.execution.operations import alltoall
from ringreduce.execution.signature import Signature, calling_line
from ringreduce.execution.submission import Handle, Submission
from ringreduce.negotiation import errors_for
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.negotiation import GLOBAL, Negotiation
from ringreduce.negotiation.negotiator import Group, Negotiator
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.short import Short
from ringreduce.transport.base import Steps
from ringreduce.transport.waiting import WaitsFor
from ringreduce.world import World

IN_ORDER: Mapping[str, Operation] = {"reduce": allreduce, "gather": alltoall, "scatter": alltoall}
FIRST_OWN = -(1 << 32)  # the number of the first channel that its members open alone


class ProcessSets:
    """Used by the thread that polls (engine/polling.py), but for `sets`, `numbered`, `open` and `shut`."""

    def __init__(
        self,
        world: World,
        host: Host,
        inbox: Inbox,
        mailbox: Mailbox,
        negotiation: Negotiation,
        make_context: Callable[..., Context],
    ) -> None:
        """make_context: as Context(algorithms, members, operations=...)."""
        self.members: dict[int, tuple[int, ...]] = {}
        """Of all sets, by number, including those without this rank, and of channels, whose numbers are negative."""
        self._world, self._host = world, host
        self._inbox, self._mailbox, self._negotiation, self._make_context = inbox, mailbox, negotiation, make_context
        self._states, self._channels = negotiation.states, negotiation.channels
        self.gone: dict[int, str] = {}  # sets that ended with a rank that was lost: why
        self._resources: dict[int, Resources] = {}
        self._bases: dict[int, int] = {}  # the process set of each channel
        self._next, self._next_channel = 0, -1
        self._own_numbers = itertools.count(FIRST_OWN, -1)

    @property
    def sets(self) -> dict[int, tuple[int, ...]]:
        """The members of all process sets, by number, without channels. Any thread may ask."""
        with self._inbox.lock:
            return {number: each for number, each in self.members.items() if number >= GLOBAL}

    def numbered(self) -> list[tuple[int, ...] | str]:
        """The members of all sets but the first, in the order of their numbers; or why a set has ended."""
        with self._inbox.lock:
            gone = [self.gone.get(each, "it was removed") for each in range(self._next)]
            return [self.members.get(each, gone[each]) for each in range(1, self._next)]

    def skip(self, why: str) -> None:
        """Leave out the number of a set that has ended."""
        with self._inbox.lock:
            self.gone[self._next] = why
            self._next += 1

    def add(self, members: Sequence[int]) -> int:
        """Make a process set; all ranks of the world do so in the same order, so its number is equal on all."""
        resources = self._resources[self._next] = self._host.reserve(members)
        rank, number, state = self._world.rank, self._next, None
        if rank in members:
            operations = {
                "add_process_set": self._add_all,
                "remove_process_set": self._remove_all,
                "ordered": self._open_all,
            }
            context = self._make_context(
                self._host.algorithms(resources, members), tuple(members), operations=operations
            )
            blocks = self._host.group_blocks(resources.region, members)
            memories = range(len(members)) if blocks is None else [self._world.hosts[each] for each in members]
            group, short_bytes = Group(members, memories, rank), context.algorithms.short_bytes
            negotiator = Negotiator(
                number,
                members,
                rank,
                self._world.size,
                group,
                blocks,
                context.settings.cache_capacity,
                fence=self._host.window.fence if self._host.window and len(group.ranks) > 1 else lambda: None,
                send=self._mailbox.send_others,
                resubmit=self._negotiation.again.extend,
                short=Short(short_bytes, group.below) if short_bytes and len(group.ranks) == 1 else None,
            )
            state = ProcessSetState(number, Executor(context), negotiator)
        with self._inbox.lock:
            self._next += 1
            self.members[number] = tuple(members)
            if state is not None:
                self._states[number] = state
        self._negotiation.added(number)
        return number

    # Operations: queued, so that all ranks run them in the same order

    def _add_all(self, submissions: Sequence[Submission], context: Context) -> Steps[None]:
        for submission in submissions:
            submission.payload = self.add(submission.signature.detail("ranks"))
            submission.complete()
        yield from ()

    def _remove_all(self, submissions: Sequence[Submission], context: Context) -> Steps[None]:
        """Remove sets when their operations on this rank have ended, and their memory when those on all ranks have.

        What a set's ranks still run is decided in its own schedule, which ends with a response: this one's order says
        nothing of that one's.
        """
        for submission in submissions:
            number = submission.signature.detail("process_set")
            if number in self.members:
                numbers = [number, *(each for each, base in self._bases.items() if base == number)]
                lost = yield from self._end(numbers, f"process set {number} was removed")
                everyones = yield from bruck.allgather(np.array([lost], np.int64), context.transport)
                for each in numbers:  # no rank looks at this one's flags and counters any more
                    self._host.clear(self._resources[each], self._world.rank in self.members[each])
                yield from bruck.allgather(np.array([0], np.int64), context.transport)
                self._give_back(numbers, not everyones.any())
            submission.complete()

    def _end(self, numbers: Sequence[int], why: str) -> Steps[bool]:
        """End a set's operations and drop those of its channels; True when there were any, to which MPI may write."""
        channels = [self._channels[each] for each in numbers if each in self._channels]
        lost = any(each.busy for each in channels)
        for channel in channels:
            self._negotiation.close(channel, why, -1)
        state = self._states.get(numbers[0])
        if state is not None:
            if state.coordinator is not None:
                state.coordinator.close(why)
            yield Ended(state)
            yield from state.algorithms.gpu.release()
        with self._inbox.lock:
            for number in numbers:
                self._states.pop(number, None)
                self._channels.pop(number, None)
        return lost

    def _give_back(self, numbers: Sequence[int], whole: bool) -> None:
        """Forget a set and its channels; whole: other sets may use the tags and memory."""
        for number in numbers:
            members, resources = self.members[number], self._resources.pop(number)
            if whole:
                self._host.release(resources, members)
            with self._inbox.lock:
                self.members.pop(number)
                self._bases.pop(number, None)

    def _open_all(self, submissions: Sequence[Submission], context: Context) -> Steps[None]:
        """Open channels; all ranks of the world do so in the same order."""
        for submission in submissions:
            base = submission.signature.detail("process_set")
            members, number = self.members.get(base), self._next_channel
            if members is None:
                raise InputError(f"ordered: there is no process set {base}; it was removed")
            resources = self._resources[number] = self._host.reserve(members)
            if self._world.rank in members:
                own = self._channel_context(self._host.algorithms(resources, members), members, IN_ORDER)
                signatures = self._host.signatures(resources, members)
                self._channels[number] = Channel(number, base, own, self._world, signatures)
                self._channels[number].patient = submission.signature.detail("patient")
            with self._inbox.lock:
                self._next_channel, self.members[number], self._bases[number] = number - 1, members, base
            submission.payload = number
            submission.complete()
        yield from ()

    def _channel_context(
        self, algorithms: Algorithms, members: Sequence[int], operations: Mapping[str, Operation]
    ) -> Context:
        """Of a channel, with memory of its own."""
        settings = self._host.settings
        memory = fusion.Memory(settings.fusion_buffer_bytes // 2, settings.fusion_slot_bytes)
        return self._make_context(algorithms, tuple(members), operations=operations, memory=memory)

    # Channels that their members open alone; called by any thread

    def open(self, members: Sequence[int], name: str, operations: Mapping[str, Operation]) -> tuple[int, Handle]:
        """Begin to open a channel; no rank but the members takes part, and each opens one after the other.

        members: ranks of the world, by rank in the channel;  name: in messages;  operations: see Context.
        Returns: its number, which other ranks do not know, and the handle to wait for.
        Raises:  CollectiveError when the engine has failed, and so does the handle.
        """
        number, inbox = next(self._own_numbers), self._inbox
        signature = Signature("open", name, details=(("ranks", tuple(members)),))
        key, line = signature.key, calling_line()
        submission = Submission(
            signature, number, (), (), lambda _: None, None, line, True, key, inbox.wait, inbox.on_poll
        )

        def begin() -> None:
            context = self._channel_context(before_opening(self._host, members), members, operations)
            channel = Channel(number, GLOBAL, context, self._world, name=name)
            with inbox.lock:
                self.members[number], self._channels[number] = context.members, channel
            if (error := self._failure(submission)) is None:
                channel.open(submission, self._host)
            else:
                submission.fail(error)

        if (error := self._failure(submission)) is not None:  # the engine's thread may have ended
            raise error
        inbox.call_soon(begin)
        return number, submission

    def _failure(self, submission: Submission) -> CollectiveError | None:
        """The error of what is opened when the engine has failed."""
        error = self._negotiation.error
        return None if error is None else errors_for.engine_closed(submission, str(error), error)

    def shut(self, number: int) -> None:
        """Close such a channel, on this rank; what is not complete fails."""

        def end() -> None:
            with self._inbox.lock:
                channel = self._channels.pop(number)
                del self.members[number]
            self._negotiation.close(channel, "its process group was destroyed", -1)

        self._inbox.call_soon(end)

    # The service

    def is_busy(self) -> bool:
        """True while an operation is under way or queued."""
        return any(each.busy for each in self._negotiation.all())

    def has_run(self, followed: dict[int, int]) -> bool:
        """True when nothing is under way, and another rank's count of schedule entries, by process set, is reached.

        Channels do not count: their operations wait for ranks that have yet to call them.
        """
        if self._negotiation.error is not None:
            return True
        states = self._states.items()
        return not any(state.busy or state.followed < followed.get(number, 0) for number, state in states)

    def poll(self) -> bool:
        """Advance all operations as far as possible without waiting; True when anything moved."""
        busy = [each for each in self._negotiation.all() if each.busy]
        if not busy:
            return False
        critical = self._inbox.latency_critical
        return any([each.poll(critical) for each in busy])  # noqa: C419, a list: all advance

    def waits_for(self) -> WaitsFor:
        """What operations under way must be polled for."""
        found = [each.waits_for() for each in self._negotiation.all() if each.busy]
        return max(found) if found else WaitsFor.NOTHING
