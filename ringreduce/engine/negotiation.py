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
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Submission
from ringreduce.execution.timeline import Timeline
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.negotiator import Message
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.protocol import JOIN, Announcement, Failure, Overdue, Ready, Response, Scheduled
from ringreduce.settings import Settings
from ringreduce.settings.log import LOGGER, TRACE
from ringreduce.transport.waiting import WaitsFor
from ringreduce.transport.world import World

CHECK_S = 0.05  # how often a leader that has nothing else to do looks for what waits
OVERDUE_SHARE = 0.8
"""A cached tensor that has waited for this share of the time after which it is reported is negotiated by records, which
name the ranks and lines that the report needs."""
NAMED_IN_LOG = 8  # how many operations a log line names


class Negotiation:
    """The negotiation of one engine."""

    def __init__(
        self,
        world: World,
        settings: Settings,
        mailbox: Mailbox,
        inbox: Inbox,
        ending: Ending,
        timeline: Timeline,
        neutral: Callable[[Signature, int], Submission],
    ) -> None:
        """neutral: makes the submission of a joined rank, of this signature to a process set."""
        self.states: dict[int, ProcessSetState] = {}  # of this rank's process sets, by number
        self.known_submissions = 0  # how many submissions were counted by their id
        self._world, self._mailbox, self._inbox, self._ending = world, mailbox, inbox, ending
        self._timeline, self._neutral, self._lock = timeline, neutral, inbox.lock
        self._newest = -1  # the newest process set
        limit_s = min(filter(None, (settings.stall_check_s, settings.stall_abort_s)), default=math.inf)
        self._overdue_s, self._next_check_s = OVERDUE_SHARE * limit_s, 0.0
        self.resubmitted: list[Submission] = []  # counted by ids that were forgotten; a join that waited for those
        self._early: dict[int, list[tuple[int, Message]]] = {}
        """Messages for process sets that this rank has not added yet."""
        self._debugs, self._traces = LOGGER.isEnabledFor(logging.DEBUG), LOGGER.isEnabledFor(TRACE)
        self.logs = self._debugs or self._traces  # each operation
        mailbox.handlers |= dict.fromkeys((Announcement, Response, Ready, Scheduled, Overdue), self._receive)

    def poll(self) -> bool:
        """Do what can be done without waiting; True when anything moved."""
        moved = self.announce()
        for state in list(self.states.values()):
            moved |= state.negotiator.poll()
            moved |= self._follow(state)
        if not moved and (now := time.monotonic()) >= self._next_check_s:
            self._next_check_s = now + CHECK_S
            for state in self.states.values():
                state.negotiator.check(now, self._overdue_s)
        return moved

    def waits_for(self) -> WaitsFor:
        """Control messages, while anything is announced."""
        pending = 0
        for state in self.states.values():
            pending += len(state.pending)
        waits = self._ending.leaving or (pending and self._inbox.announced(pending))
        return WaitsFor.CONTROL if waits else WaitsFor.NOTHING

    def added(self, number: int) -> None:
        """Process set `number` was added, with this rank or without."""
        self._newest = number
        for source, message in self._early.pop(number, []):
            self._receive(source, message)
        if self._ending.leaving and number in self.states:
            self._leave(self.states[number])

    def followed(self) -> dict[int, int]:
        """By process set, how many entries of its schedule this rank has followed."""
        return {number: state.followed for number, state in self.states.items()}

    # Announcements

    def announce(self) -> bool:
        """Announce new submissions; True when there were any."""
        submissions = self._inbox.take()
        if self.resubmitted:
            submissions = [each for each in self.resubmitted if not each.ended] + submissions
            self.resubmitted.clear()
        if not submissions:
            return False
        if self._timeline.recording:
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
            self._timeline.ready(others, self._world.rank)
        self.known_submissions += state.negotiator.announce(others, joins[0] if joins else None)

    def announce_leaving(self) -> None:
        """Send the last announcement to every process set; earlier announcements stay valid."""
        for state in list(self.states.values()):
            self._leave(state)

    def _leave(self, state: ProcessSetState) -> None:
        state.negotiator.announce([], leave=self._ending.leaving)
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
        while self._ending.error is None and (entry := state.negotiator.next()) is not None:
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
            self._ending.close(state, response.closed, response.leaver)

    def _ready(self, state: ProcessSetState, signature: Signature) -> Submission:
        """This rank's submission, or the neutral elements of a joined rank."""
        with self._lock:
            submission = state.pending.pop(signature.key, None)
            if submission is None:
                if not state.joined:
                    raise AssertionError(f"rank {self._world.rank} did not submit {signature.key!r}, but must run it")
                submission = self._neutral(signature, state.number)
            submission.begin(state.running)
        return submission

    def _run(self, state: ProcessSetState, submissions: Sequence[Submission], divisor: int) -> None:
        if self._debugs:
            what = f"rank {self._world.rank}, process set {state.number}, response {state.negotiator.applied}"
            LOGGER.debug(f"{what}: {_named([each.signature for each in submissions])}")
        for submission in submissions if self._timeline.recording else ():
            self._timeline.negotiated(submission, (state.number, state.followed, submission.key, len(state.members)))
        for submission in submissions:
            if submission.recorder is not None:
                submission.ready_s = time.monotonic()
        state.executor.run(submissions, divisor)

    def _end_join(self, state: ProcessSetState, last: int) -> None:
        """Let join() return when the operations queued before are done."""
        with self._lock:
            state.joins += 1
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


def _named(signatures: Sequence[Signature]) -> str:
    """The first operations, for the log."""
    names = [each.text for each in signatures[:NAMED_IN_LOG]]
    more = len(signatures) - NAMED_IN_LOG
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
