"""Negotiation: announces this rank's submissions, decides for the sets that it coordinates, and runs what is ready.

Ranks announce to the first rank of a process set, its coordinator, which responds to all of them. Its responses are
numbered; what is ready runs in their order, which is the same on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ringreduce import errors
from ringreduce.execution.signature import Signature, SubmissionRecord
from ringreduce.execution.submission import Submission
from ringreduce.gpu.stream import Gpu
from ringreduce.log import LOGGER, TRACE
from ringreduce.monitor.timeline import Timeline
from ringreduce.negotiation import errors_for
from ringreduce.negotiation.cache import numbers
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.neutral import neutral_submission
from ringreduce.negotiation.process_set import ProcessSetState
from ringreduce.negotiation.protocol import Announcement, Failure, Response
from ringreduce.transport.waiting import WaitsFor
from ringreduce.world import World

if TYPE_CHECKING:
    from ringreduce.engine.inbox import Inbox

GLOBAL = 0  # the number of the process set of all ranks
JOIN = "join"
NAMED_IN_LOG = 8  # how many operations a log line names


class Negotiation:
    """One engine's; used by its thread only."""

    def __init__(self, world: World, mailbox: Mailbox, inbox: Inbox, timeline: Timeline, gpu: Gpu) -> None:
        self.states: dict[int, ProcessSetState] = {}  # of this rank's process sets, by number
        self.known_submissions = 0  # how many submissions were announced by a bit
        self.joins = 0  # how often all ranks have joined; equal on all ranks between two operations
        self.leaving = ""  # not empty: why this rank leaves
        self.left: set[int] = set()  # on rank 0: the ranks that have left
        self.error: Exception | None = None  # why the engine has failed; it runs nothing any more
        self._world, self._mailbox, self._inbox, self._timeline, self._gpu = world, mailbox, inbox, timeline, gpu
        self._lock = inbox.lock
        self._newest = -1  # the newest process set
        self._early: dict[int, list[tuple[int, Announcement | Response]]] = {}
        """Messages for process sets that this rank has not added yet."""
        self._debugs, self._traces = LOGGER.isEnabledFor(logging.DEBUG), LOGGER.isEnabledFor(TRACE)
        mailbox.handlers |= {Announcement: self._receive, Response: self._receive}

    def poll(self) -> bool:
        """Do what can be done without waiting; True when anything moved."""
        moved = self.announce()
        moved |= self._mailbox.receive()
        for state in list(self.states.values()):
            response = state.coordinator.decide() if state.coordinator is not None else None
            if response is not None:
                self.send_response(state, response)
                moved = True
        return moved

    def waits_for(self) -> WaitsFor:
        """Control messages, while anything is announced, or to be sent."""
        pending = sum(len(state.pending) for state in self.states.values())
        waits = self.leaving or self._inbox.announced(pending) or not self._mailbox.flushed()
        return WaitsFor.CONTROL if waits else WaitsFor.NOTHING

    def added(self, number: int) -> None:
        """Process set `number` was added, with this rank or without."""
        self._newest = number
        for source, message in self._early.pop(number, []):
            self._receive(source, message)
        if self.leaving and number in self.states:
            self._send_announcement(self.states[number], Announcement(number, 0, leave=self.leaving))

    def unfinished(self) -> list[Submission]:
        """All pending and running submissions; with the lock held."""
        return [each for state in self.states.values() for each in (*state.pending.values(), *state.running.values())]

    # Announcements

    def announce(self) -> bool:
        """Announce new submissions to the coordinators; True when there were any."""
        submissions = self._inbox.take()
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
                self._send_announcement(state, self._announcement(state, own))
        return True

    def announce_leaving(self) -> None:
        """Send the last announcement to every process set; earlier announcements stay valid."""
        for state in list(self.states.values()):
            self._send_announcement(state, Announcement(state.number, state.seen, leave=self.leaving))

    def _announcement(self, state: ProcessSetState, submissions: Sequence[Submission]) -> Announcement:
        bits = 0
        records = []
        join = None
        for submission in submissions:
            if submission.signature.kind == JOIN:
                join = submission.payload
                continue
            number = None if submission.signature.numbered else state.cache.number(submission.signature)
            if number is None:
                records.append(SubmissionRecord(submission.signature, submission.line, submission.waits))
            else:
                bits |= 1 << number
                self.known_submissions += 1
        return Announcement(state.number, state.seen, bits, tuple(records), join)

    def _send_announcement(self, state: ProcessSetState, announcement: Announcement) -> None:
        if state.coordinator is None:
            self._mailbox.send(announcement, state.leader)
        else:
            self._receive(self._world.rank, announcement)

    def _receive(self, source: int, message: Announcement | Response) -> None:
        state = self.states.get(message.process_set)
        if message.process_set > self._newest:
            self._early.setdefault(message.process_set, []).append((source, message))
        elif state is None:
            return  # the process set was removed
        elif isinstance(message, Response):
            self._apply(state, message)
        elif state.coordinator is not None:
            if message.leave and message.process_set == GLOBAL:
                self.left.add(source)
            state.coordinator.announce(source, message)
            if self._timeline.recording:
                known = [state.coordinator.signature(number) for number in numbers(message.bits)]
                for signature in (*(record.signature for record in message.records), *known):
                    self._timeline.ready(signature, source)

    # Responses

    def send_response(self, state: ProcessSetState, response: Response) -> None:
        """Send a coordinator's response to all members, and apply it on this rank."""
        self._mailbox.send_others(response, state.members)
        self._apply(state, response)

    def _apply(self, state: ProcessSetState, response: Response) -> None:
        """Do what the coordinator has decided."""
        if self.error is not None:  # a rank's Broken may arrive before the response that it failed to run
            return
        state.seen = response.number
        for failure in response.failures:
            self._fail(state, failure)
        divisor = len(state.members)
        if response.live_average:
            divisor = max(1, divisor - len(response.joined))
        signatures = [state.cache[number] for number in numbers(response.bits)] + list(response.new)
        for number in response.forgotten:
            state.cache.forget(number)
        for number, signature in response.learned:
            state.cache.learn(number, signature)
        if signatures:
            if self._debugs:
                what = f"rank {self._world.rank}, process set {state.number}, response {response.number}"
                LOGGER.debug(f"{what}: {_named(signatures)}")
            self._run(state, signatures, divisor)
        if response.all_joined >= 0:
            self._end_join(state, response.all_joined)
        if response.closed:
            self.close(state, response.closed, response.leaver)

    def _run(self, state: ProcessSetState, signatures: Sequence[Signature], divisor: int) -> None:
        submissions = []
        with self._lock:
            for signature in signatures:
                submission = state.pending.pop(signature.key, None)
                if submission is None:
                    if not state.joined:
                        raise AssertionError(
                            f"rank {self._world.rank} did not submit {signature.key!r}, but must run it"
                        )
                    submission = neutral_submission(signature, state.number, self._gpu)
                submission.begin(state.running, self._lock)
                submissions.append(submission)
        for submission in submissions:
            self._timeline.agreed(submission)
        state.executor.run(submissions, divisor)

    def _end_join(self, state: ProcessSetState, last: int) -> None:
        """Let join() return when the operations queued before are done."""
        with self._lock:
            self.joins += 1
            state.joined = False
            state.submitted = 0  # a rank that joined early has numbered fewer submissions than the others
            submission = state.pending.pop("join.join")
            submission.begin(state.running, self._lock)
        submission.payload = last
        state.executor.run([submission], 1)

    def _fail(self, state: ProcessSetState, failure: Failure) -> None:
        with self._lock:
            submission = state.pending.pop(failure.key, None)
        if submission is not None:
            submission.fail(getattr(errors, failure.kind)(failure.message))

    def close(self, state: ProcessSetState, closed: str, leaver: int) -> None:
        """Close a process set: its pending submissions fail."""
        with self._lock:
            if not state.closed:
                state.closed, state.leaver = closed, leaver
            lost, state.pending = state.pending, {}
        for submission in lost.values():
            submission.fail(errors_for.never_complete(state, submission, self._world, self.leaving))

    def stop(self, error: Exception) -> None:
        """The engine has failed: fail all pending and running submissions, and run nothing any more."""
        with self._lock:
            self.error = error
            lost = self.unfinished()
            for state in self.states.values():
                state.pending, state.running = {}, {}
                state.executor.abandon()
        for submission in lost:
            submission.fail(error)


def _named(signatures: Sequence[Signature]) -> str:
    """The first operations, for the log."""
    names = [f"{each.kind} {each.name!r}" for each in signatures[:NAMED_IN_LOG]]
    more = len(signatures) - NAMED_IN_LOG
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
