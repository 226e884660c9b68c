"""The process sets of one engine: adds and removes them, and runs their operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringreduce import fusion
from ringreduce.engine.channels import Channels
from ringreduce.engine.inbox import Inbox
from ringreduce.errors import InputError
from ringreduce.execution.allreduce import allreduce
from ringreduce.execution.channel import Channel
from ringreduce.execution.context import Context
from ringreduce.execution.executor import Executor, Idle
from ringreduce.execution.host import Host
from ringreduce.execution.operations import alltoall
from ringreduce.execution.submission import Submission
from ringreduce.monitor.timeline import Timeline
from ringreduce.negotiation.negotiation import Negotiation
from ringreduce.negotiation.negotiator import Group
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.transport.base import Steps
from ringreduce.transport.waiting import WaitsFor
from ringreduce.world import World


class ProcessSets:
    """Used by the engine's thread, but for `members`."""

    def __init__(
        self,
        world: World,
        host: Host,
        inbox: Inbox,
        negotiation: Negotiation,
        channels: Channels,
        make_context: Callable[..., Context],
    ) -> None:
        """make_context: as Context(algorithms, members, operations=...)."""
        self.members: dict[int, tuple[int, ...]] = {}  # of all sets, by number, including those without this rank
        self._world, self._host = world, host
        self._inbox, self._negotiation, self._make_context = inbox, negotiation, make_context
        self._states, self._channels = negotiation.states, channels
        self._next = 0

    def add(self, members: Sequence[int]) -> int:
        """Make a process set; all ranks of the world do so in the same order, so its number is equal on all."""
        resources = self._host.reserve(members)
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
            hosts = members if blocks is None else [self._world.hosts[each] for each in members]
            negotiator = self._negotiation.negotiator(number, members, Group(members, hosts, rank), blocks)
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
        """Remove sets when their operations on this rank have ended: only then other sets may use their tags."""
        for submission in submissions:
            number = submission.signature.detail("process_set")
            state = self._states.get(number)
            if state is not None:
                self._negotiation.close(state, f"process set {number} was removed", -1)
                yield Idle(state.executor)
                yield from state.algorithms.gpu.release()
            with self._inbox.lock:
                self._states.pop(number, None)
                members = self.members.pop(number, None)
            if members is not None:
                self._host.release(members)
            submission.complete()

    def _open_all(self, submissions: Sequence[Submission], context: Context) -> Steps[None]:
        """Open channels; all ranks of the world do so in the same order."""
        for submission in submissions:
            number = submission.signature.detail("process_set")
            members, channel = self.members.get(number), None
            if members is None:
                raise InputError(f"ordered: there is no process set {number}; it was removed")
            resources = self._host.reserve(members)
            if self._world.rank in members:
                own = self._make_context(
                    self._host.algorithms(resources, members),
                    members,
                    operations={"reduce": allreduce, "gather": alltoall, "scatter": alltoall},
                    memory=fusion.Memory(context.memory.total_bytes, context.memory.block_bytes),
                    timeline=Timeline(),
                )
                signatures = self._host.signatures(resources, members)
                channel = Channel(own, self._world, signatures, lambda: self._inbox.call_soon(lambda: None))
            submission.payload = self._channels.add(channel, number, members)
            submission.complete()
        yield from ()

    # The service

    def is_busy(self) -> bool:
        """True while an operation is under way or queued."""
        return any(state.executor.busy for state in self._states.values())

    def poll(self) -> bool:
        """Advance all operations as far as possible without waiting; True when anything moved."""
        moved = False
        for state in list(self._states.values()):
            moved |= state.executor.advance(self._inbox.latency_critical)
        return moved

    def waits_for(self) -> WaitsFor:
        """What operations under way must be polled for."""
        return max([state.executor.waits_for() for state in self._states.values()], default=WaitsFor.NOTHING)
