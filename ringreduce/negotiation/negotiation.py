"""Negotiation: announces this rank's submissions, does a leader's and coordinator's work, and runs what is ready.

The first rank of a process set is its coordinator. What is ready runs in the order of a schedule, which is the same on
all ranks; see negotiator.py.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from ringreduce import errors
from ringreduce.engine.inbox import Inbox
from ringreduce.execution.channel import Channel
from ringreduce.execution.executor import Running
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Submission
from ringreduce.gpu.stream import Gpu
from ringreduce.log import LOGGER, TRACE
from ringreduce.monitor.timeline import Timeline
from ringreduce.negotiation import errors_for
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.negotiator import Message
from ringreduce.negotiation.neutral import neutral_submission
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.protocol import Announcement, Failure, Overdue, Ready, Response, Scheduled
from ringreduce.settings import Settings
from ringreduce.transport.waiting import WaitsFor
from ringreduce.world import World

GLOBAL = 0  # the number of the process set of all ranks
JOIN = "join"
CHECK_S = 0.05  # how often a leader that has nothing else to do looks for what waits
OVERDUE_SHARE = 0.8
"""A cached tensor that has waited for this share of the time after which it is reported is negotiated by records, which
name the ranks and lines that the report needs."""
LAST_MESSAGES_S = 1.0  # how long a channel's operations may take that a rank had done before it left
NAMED_IN_LOG = 8  # how many operations a log line names


class Negotiation:
    """One engine's; used only by the thread that polls (engine/polling.py)."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        mailbox: Mailbox,
        inbox: Inbox,
        timeline: Timeline,
        gpu: Gpu,
        sweep: Callable[[], object],
    ) -> None:
        """sweep: called now and then."""
        self.states: dict[int, ProcessSetState] = {}  # of this rank's process sets, by number
        self.channels: dict[int, Channel] = {}  # of those process sets, by number
        self.known_submissions = 0  # how many submissions were counted by their id
        self.joins = 0  # how often all ranks have joined; equal on all ranks between two operations
        self.leaving = ""  # not empty: why this rank leaves
        self.leaving_s = math.inf  # since when, for the stall watch
        self.error: Exception | None = None  # why the engine has failed; it runs nothing any more
        self._world, self._mailbox, self._inbox, self._timeline, self._gpu = world, mailbox, inbox, timeline, gpu
        self._lock, self._sweep = inbox.lock, sweep
        self._newest = -1  # the newest process set
        limit_s = min(filter(None, (settings.stall_check_s, settings.stall_abort_s)), default=math.inf)
        self._overdue_s, self._next_check_s = OVERDUE_SHARE * limit_s, 0.0
        self.again: list[Submission] = []  # counted by ids that were forgotten since; a join that waited for those
        self._early: dict[int, list[tuple[int, Message]]] = {}
        """Messages for process sets that this rank has not added yet."""
        self._debugs, self._traces = LOGGER.isEnabledFor(logging.DEBUG), LOGGER.isEnabledFor(TRACE)
        mailbox.handlers |= dict.fromkeys((Announcement, Response, Ready, Scheduled, Overdue), self._receive)

    def poll(self) -> bool:
        """Do what can be done without waiting; True when anything moved."""
        moved = self.announce()
        for state in list(self.states.values()):
            moved |= state.negotiator.poll()
            moved |= self._follow(state)
        if not moved and (now := time.monotonic()) >= self._next_check_s:
            self._next_check_s = now + CHECK_S
            self._sweep()
            for state in self.states.values():
                state.negotiator.check(now, self._overdue_s)
            for channel in list(self.channels.values()):
                with self._lock:
                    overdue = channel.overdue(now)
                if overdue:
                    self.close(channel, overdue, -1)
                state = self.states[channel.process_set]
                if state.closed and channel.busy and now - channel.stuck().moved_s > LAST_MESSAGES_S:
                    self.close(channel, state.closed, state.leaver)
        return moved

    def waits_for(self) -> WaitsFor:
        """Control messages, while anything is announced."""
        pending = [len(state.pending) for state in self.states.values() if state.pending]
        waits = self.leaving or (pending and self._inbox.announced(sum(pending)))
        return WaitsFor.CONTROL if waits else WaitsFor.NOTHING

    def added(self, number: int) -> None:
        """Process set `number` was added, with this rank or without."""
        self._newest = number
        for source, message in self._early.pop(number, []):
            self._receive(source, message)
        if self.leaving and number in self.states:
            self._leave(self.states[number])

    def followed(self) -> dict[int, int]:
        """By process set, how many entries of its schedule this rank has followed."""
        return {number: state.followed for number, state in self.states.items()}

    def unfinished(self) -> list[Submission]:
        """All pending and running submissions; with the lock held."""
        found = [each for state in self.states.values() for each in state.pending.values()]
        return found + [each for on in self.all() for each in list(on.running.values())]

    def oldest_pending(self, state: ProcessSetState) -> Submission | None:
        """The one that has waited longest; joins are not counted, which may wait for as long as the others train."""
        with self._lock:  # the user's threads add to it
            return next((each for key, each in state.pending.items() if key != "join.join"), None)

    def oldest_running(self, on: Running) -> Submission | None:
        """The one that has run longest."""
        with self._lock:
            return next(iter(on.running.values()), None)

    def all(self) -> list[Running]:
        """All process sets and channels of this rank."""
        return [*self.states.values(), *self.channels.values()]

    # Announcements

    def announce(self) -> bool:
        """Announce new submissions; True when there were any."""
        submissions = self._inbox.take()
        if self.again:
            submissions = [each for each in self.again if not each.ended] + submissions
            self.again.clear()
        if not submissions:
            return False
        self._timeline.cycle()
        if self._traces:
            names = _named([each.signature for each in submissions])
            LOGGER.log(TRACE, f"rank {self._world.rank} announces {names}")
        by_set: dict[int, list[Submission]] = {}
        for submission in submissions:
            by_set.setdefault(submission.process_set, []).append(submission)
        for number, own in by_set.items():
            state = self.states.get(number)
            if state is not None and not state.closed:
                self._announce(state, own)
        return True

    def _announce(self, state: ProcessSetState, submissions: Sequence[Submission]) -> None:
        joins, others = [], submissions
        if state.joined:
            joins = [each for each in submissions if each.signature.kind == JOIN]
            others = [each for each in submissions if each.signature.kind != JOIN]
        if self._timeline.recording:
            for each in others:
                self._timeline.ready(each.signature, self._world.rank)
        self.known_submissions += state.negotiator.announce(others, joins[0] if joins else None)

    def announce_leaving(self) -> None:
        """Send the last announcement to every process set; earlier announcements stay valid."""
        for state in list(self.states.values()):
            self._leave(state)

    def _leave(self, state: ProcessSetState) -> None:
        state.negotiator.announce([], leave=self.leaving)
        state.left.add(self._world.rank)

    def _receive(self, source: int, message: Message) -> None:
        state = self.states.get(message.process_set)
        if message.process_set > self._newest:
            self._early.setdefault(message.process_set, []).append((source, message))
        elif state is not None:  # else the process set was removed
            if isinstance(message, Announcement) and message.leave:
                state.left.add(source)
            state.negotiator.receive(source, message)

    # What all ranks do next

    def _follow(self, state: ProcessSetState) -> bool:
        """Do what the schedule says; True when it says anything."""
        moved = False
        while self.error is None and (entry := state.negotiator.next()) is not None:
            moved = True
            state.followed += 1
            if isinstance(entry, Response):
                self._apply(state, entry)
            else:
                pending, running = state.pending, state.running
                with self._lock:
                    for each in entry:
                        each.in_flight = running
                        running[each.key] = pending.pop(each.key)
                self._run(state, entry, len(state.members))
        return moved

    def _apply(self, state: ProcessSetState, response: Response) -> None:
        """Do what the coordinator has decided."""
        for failure in response.failures:
            self._fail(state, failure)
        divisor = len(state.members)
        if response.live_average:
            divisor = max(1, divisor - len(response.joined))
        if response.new:
            self._run(state, [self._ready(state, each) for each in response.new], divisor)
        if response.all_joined >= 0:
            self._end_join(state, response.all_joined)
        if response.closed:
            self.close(state, response.closed, response.leaver)

    def _ready(self, state: ProcessSetState, signature: Signature) -> Submission:
        """This rank's submission, or the neutral elements of a joined rank."""
        with self._lock:
            submission = state.pending.pop(signature.key, None)
            if submission is None:
                if not state.joined:
                    raise AssertionError(f"rank {self._world.rank} did not submit {signature.key!r}, but must run it")
                submission = neutral_submission(signature, state.number, self._gpu)
            submission.begin(state.running)
        return submission

    def _run(self, state: ProcessSetState, submissions: Sequence[Submission], divisor: int) -> None:
        if self._debugs:
            what = f"rank {self._world.rank}, process set {state.number}, response {state.negotiator.applied}"
            LOGGER.debug(f"{what}: {_named([each.signature for each in submissions])}")
        for submission in submissions if self._timeline.recording else ():
            self._timeline.agreed(submission)
        state.executor.run(submissions, divisor)

    def _end_join(self, state: ProcessSetState, last: int) -> None:
        """Let join() return when the operations queued before are done."""
        with self._lock:
            self.joins += 1
            state.joined = False
            state.submitted = 0  # a rank that joined early has numbered fewer submissions than the others
            submission = state.pending.pop("join.join")
            submission.begin(state.running)
        submission.payload = last
        state.executor.run([submission], 1)

    def _fail(self, state: ProcessSetState, failure: Failure) -> None:
        with self._lock:
            submission = state.pending.pop(failure.key, None)
        if submission is not None:
            submission.fail(getattr(errors, failure.kind)(failure.message))

    def close(self, each: Running, closed: str, leaver: int) -> None:
        """Close a process set, whose pending submissions fail, or a channel, where running ones fail too."""
        with self._lock:
            if not each.closed:
                each.closed, each.leaver = closed, leaver
            if isinstance(each, ProcessSetState):
                pending, each.pending = each.pending, {}
                lost = list(pending.values())
            else:
                lost = each.abandon()
        for submission in lost:
            submission.fail(errors_for.never_complete(each, submission, self._world, self.leaving))

    def stop(self, error: Exception) -> None:
        """The engine has failed: fail all pending and running submissions, and run nothing any more."""
        with self._lock:
            self.error = error
            lost = [each for state in self.states.values() for each in state.pending.values()]
            for state in self.states.values():
                state.pending = {}
            for each in self.all():
                lost += each.abandon()
        for submission in lost:
            submission.fail(error)


def _named(signatures: Sequence[Signature]) -> str:
    """The first operations, for the log."""
    names = [f"{each.kind} {each.name!r}" for each in signatures[:NAMED_IN_LOG]]
    more = len(signatures) - NAMED_IN_LOG
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
