"""The process sets of one engine: adds and removes them, and runs their operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ringreduce.collectives import bruck
from ringreduce.engine.channels import Channels
from ringreduce.engine.inbox import Inbox
from ringreduce.engine.negotiation import Negotiation
from ringreduce.errors import InputError
from ringreduce.execution.context import Context
from ringreduce.execution.executor import Ended, Executor, Running
from ringreduce.execution.host import HostResources, Resources
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.negotiator import Group, Negotiator
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.short import Short
from ringreduce.transport.base import Steps
from ringreduce.transport.waiting import WaitsFor
from ringreduce.transport.world import World


class ProcessSets:
    """The process sets of one engine; any thread may read `sets` and call `numbered`."""

    def __init__(
        self,
        world: World,
        host: HostResources,
        inbox: Inbox,
        mailbox: Mailbox,
        negotiation: Negotiation,
        ending: Ending,
        channels: Channels,
        make_context: Callable[..., Context],
        busy: Mapping[Executor, None],
    ) -> None:
        """make_context: as Context(algorithms, members, operations=...);  busy: shared by all of these."""
        self.members: dict[int, tuple[int, ...]] = {}
        """Of all sets, by number, including those without this rank."""
        self._world, self._host = world, host
        self._inbox, self._mailbox, self._negotiation, self._make_context = inbox, mailbox, negotiation, make_context
        self.states, self.channels, self._ending = negotiation.states, channels, ending
        self.gone: dict[int, str] = {}  # sets that ended with a rank that was lost: why
        self._resources: dict[int, Resources] = {}
        self._next, self._busy = 0, busy

    @property
    def sets(self) -> dict[int, tuple[int, ...]]:
        """As `members`; any thread may ask."""
        with self._inbox.lock:
            return dict(self.members)

    def numbered(self) -> list[tuple[int, ...] | str]:
        """The members of all sets but the first, in the order of their numbers; or why a set has ended."""
        with self._inbox.lock:
            gone = [self.gone.get(each, "it was removed") for each in range(self._next)]
            return [self.members.get(each, gone[each]) for each in range(1, self._next)]

    def begin(self, others: Iterable[Sequence[int] | str]) -> None:
        """Create the set of all ranks, and these others; a text, why one has ended, only takes a number."""
        for each in (range(self._world.size), *others):
            if isinstance(each, str):
                with self._inbox.lock:
                    self.gone[self._next] = each
                    self._next += 1
            else:
                self.add(each)

    def add(self, members: Sequence[int]) -> int:
        """Create a process set; all ranks of the world do so in the same order, so its number is the same on all."""
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
                resubmit=self._negotiation.resubmitted.extend,
                short=Short(short_bytes, len(members), group.below, group.above is None) if short_bytes else None,
            )
            state = ProcessSetState(number, Executor(context), negotiator)
        with self._inbox.lock:
            self._next += 1
            self.members[number] = tuple(members)
            if state is not None:
                self.states[number] = state
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
                numbers = [number, *(each for each, base in self.channels.bases.items() if base == number)]
                lost = yield from self._end(numbers, f"process set {number} was removed")
                gathered = yield from bruck.allgather(np.array([lost], np.int64), context.transport)
                for each in numbers:  # no rank looks at this one's flags and counters any more
                    self._host.clear(self._resources[each], self._world.rank in self.members[number])
                yield from bruck.allgather(np.array([0], np.int64), context.transport)
                self._give_back(numbers, not gathered.any())
            submission.complete()

    def _end(self, numbers: Sequence[int], why: str) -> Steps[bool]:
        """End a set's operations and drop those of its channels; True when there were any, to which MPI may write."""
        found = self.channels.by_number
        channels = [found[each] for each in numbers if each in found]
        lost = any(each.busy for each in channels)
        for channel in channels:
            self._ending.close(channel, why, -1)
        state = self.states.get(numbers[0])
        if state is not None:
            if state.coordinator is not None:
                state.coordinator.close(why)
            yield Ended(state)
            yield from state.executor.context.gpu.release()
        with self._inbox.lock:
            self.states.pop(numbers[0], None)
            for number in numbers[1:]:
                found.pop(number, None)
        return lost

    def _give_back(self, numbers: Sequence[int], whole: bool) -> None:
        """Forget a set and its channels; whole: other sets may use the tags and memory."""
        with self._inbox.lock:
            members = self.members.pop(numbers[0])
            for number in numbers[1:]:
                self.channels.forget(number)
        for number in numbers:
            resources = self._resources.pop(number)
            if whole:
                self._host.release(resources, members)

    def _open_all(self, submissions: Sequence[Submission], context: Context) -> Steps[None]:
        """Open channels; all ranks of the world do so in the same order."""
        for submission in submissions:
            base = submission.signature.detail("process_set")
            members = self.members.get(base)
            if members is None:
                raise InputError(f"ordered: there is no process set {base}; it was removed")
            resources = self._host.reserve(members)
            number = self.channels.add(base, members, resources, submission.signature.detail("patient"))
            self._resources[number], submission.payload = resources, number
            submission.complete()
        yield from ()

    def all(self) -> list[Running]:
        """All process sets and channels of this rank."""
        return [*self.states.values(), *self.channels.by_number.values()]

    def pending(self) -> list[Submission]:
        """All submissions that are not ready on all ranks; with the inbox's lock held."""
        return [each for state in self.states.values() for each in state.pending.values()]

    # The service

    def has_run(self, followed: dict[int, int]) -> bool:
        """True when nothing is under way, and another rank's count of schedule entries, by process set, is reached.

        Channels do not count: their operations wait for ranks that have yet to call them.
        """
        if self._ending.error is not None:
            return True
        states = self.states.items()
        return not any(state.busy or state.followed < followed.get(number, 0) for number, state in states)

    def poll(self) -> bool:
        """Advance all operations as far as possible without waiting; True when anything moved."""
        if not self._busy:
            return False
        moved, critical = False, self._inbox.latency_critical
        for each in list(self._busy):
            moved |= each.advance(critical)
        return moved

    def waits_for(self) -> WaitsFor:
        """What operations under way must be polled for."""
        return max([each.waits_for() for each in list(self._busy)]) if self._busy else WaitsFor.NOTHING
