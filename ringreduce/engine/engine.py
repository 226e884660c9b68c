"""The engine: one thread per process that negotiates with the other ranks, runs collectives and completes handles.

It never blocks inside an operation: collectives are generators, and every process set has a queue of its own, so
overlapping sets cannot deadlock. Between two polls of a pending operation the engine reads control messages, announces
submissions, and decides for the process sets that it coordinates.

With nothing pending it sleeps until a submission, and polls control messages ever less often, at least once a second:
nothing can be ready on all ranks before this rank submits it. A rank that has waited long sends a probe (stalls.py).

The side jobs, timeline and stall watch, never end the main one: one that fails logs a warning, and stops. However the
thread ends, it sets `_finished`, so that nobody waits for it for ever.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce import errors, fusion
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.gpu_buffer import ready
from ringreduce.engine import errors_for
from ringreduce.engine.inbox import LONGEST_SLEEP_S, Inbox, WaitsFor
from ringreduce.engine.process_set import Idle, ProcessSetState
from ringreduce.execution import operations
from ringreduce.execution.context import Context
from ringreduce.execution.host import Host
from ringreduce.execution.signature import Signature, SubmissionRecord, calling_line, ranks_text
from ringreduce.execution.submission import Handle, Submission
from ringreduce.gpu.runtime import Event
from ringreduce.gpu.stream import Gpu
from ringreduce.log import LOGGER, TRACE
from ringreduce.monitor.recording import Recording
from ringreduce.monitor.stalls import StallWatch
from ringreduce.monitor.timeline import Timeline, TimelineFile
from ringreduce.negotiation import protocol
from ringreduce.negotiation.cache import numbers
from ringreduce.negotiation.coordinator import Coordinator
from ringreduce.negotiation.neutral import neutral_submission
from ringreduce.negotiation.protocol import Announcement, Failure, Response, StackRequest, decode, encode
from ringreduce.settings import Settings
from ringreduce.transport.base import ControlMessage, EngineTransport, Steps
from ringreduce.transport.window import Arrival
from ringreduce.world import World

GLOBAL = 0  # the number of the process set of all ranks
JOIN = "join"
SET_CHANGES = ("add_process_set", "remove_process_set")
TIMELINE, STALL_WATCH = "the timeline", "the stall watch"
NAMED_IN_LOG, NAMED_WAITS = 8, 3
"""How many operations a log line, and `waiting_for`, name."""
BROKEN_SEND_S = 1.0  # how long an engine that failed tries to notify the others


class Engine:
    """One rank's engine. Any thread may call the public methods up to `stop_timeline`."""

    def __init__(
        self,
        world: World,
        transport: EngineTransport,
        settings: Settings,
        host: Host,
        clock_offsets_us: Sequence[float] = (),
        process_sets: Sequence[Sequence[int]] = (),
    ) -> None:
        """clock_offsets_us: by rank, how far its clock is ahead of rank 0's; by default 0.

        process_sets: the members of further process sets, the same on all ranks.
        """
        self.world = world
        self.transport = transport
        self.settings = settings
        self.host = host
        self.memory = fusion.Memory(settings.fusion_buffer_bytes // 2, settings.fusion_slot_bytes)
        self.gpu = Gpu(world.rank)
        self.states: dict[int, ProcessSetState] = {}
        self.sets: dict[int, tuple[int, ...]] = {}
        """The members of all process sets, including those without this rank."""
        self.submissions = 0
        self.known_submissions = 0  # how many submissions were announced by a bit
        self.joins = 0  # how often all ranks have joined; equal on all ranks between two operations
        self.control_messages = 0
        self.control_bytes = 0
        self._clock_offsets_us = clock_offsets_us or [0.0] * world.size
        self._timeline = Timeline()
        self._recording = Recording(transport, self._timeline)
        oversubscribed = world.local_size >= host.cores
        self._inbox = Inbox(transport, settings, len(set(world.hosts)) == 1, oversubscribed)
        self._next_set = GLOBAL
        self._early: dict[int, list[ControlMessage]] = {}
        """Messages for process sets that this rank has not added yet."""
        self._debugs, self._traces = LOGGER.isEnabledFor(logging.DEBUG), LOGGER.isEnabledFor(TRACE)
        self._leaving = ""
        self._left: set[int] = set()
        self._shutdown_acked = False
        self._broken: Exception | None = None
        self._finished = threading.Event()
        self._failed_jobs: set[str] = set()  # the side jobs that have failed
        self._moved_s = time.monotonic()
        self._stalls = StallWatch(self, threading.get_ident())
        for members in (range(world.size), *process_sets):
            self._add_set(members)
        self._thread = threading.Thread(target=self._run, name=f"ringreduce engine {world.rank}", daemon=True)
        self._thread.start()

    # Called by the user's threads

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
        marks: Sequence[Event] = ()
        if any(each.on_gpu for each in inputs):
            self.gpu.check(inputs)
            marks = ready(inputs)
        with self._inbox.lock:
            state = self.states.get(process_set)
            if state is None:
                raise errors_for.unknown_set(kind, process_set, self.sets, self.world.rank)
            if name is None:
                state.submitted += 1
                signature = sign(f"noname.{state.submitted}")._replace(numbered=True)
            else:
                signature = sign(name)
            handle = Handle(signature, self._inbox.wait, self._inbox.on_poll)
            submission = Submission(
                signature, process_set, inputs, outputs, finish, payload, line, handle, waits, marks
            )
            key = submission.key
            if self._is_closed or state.closed or state.joined or key in state.pending or key in state.running:
                self._check(state, submission)
            state.pending[key] = submission
            if kind == JOIN:
                state.joined = True
            self._inbox.put(submission)
            self.submissions += 1
        self._inbox.announce_soon()
        return handle

    @property
    def _is_closed(self) -> bool:
        return self._broken is not None or bool(self._leaving)

    def _check(self, state: ProcessSetState, submission: Submission) -> None:
        """Raise an error for a submission that cannot be accepted."""
        if self._is_closed:
            why = str(self._broken or f"rank {self.world.rank} is leaving the job: {self._leaving}")
            raise errors_for.engine_closed(submission, why)
        if state.closed:
            raise errors_for.never_complete(state, submission, self.world, self._leaving)
        if state.joined:
            raise errors_for.after_join(submission)
        if submission.key in state.pending or submission.key in state.running:
            raise errors_for.name_is_pending(submission, self.world.rank)

    def leave(self, why: str, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Announce that this rank leaves, and wait until all ranks do; operations that are not ready fail.

        Returns: False when `interrupted()` became true first, or the engine had failed.
        Cost:    2 control messages for each rank but 0, to and from rank 0.
        """

        def begin() -> None:
            self._leaving, self._inbox.draining = why, True
            if isinstance(self._broken, errors.StalledError):  # the others may not know, and would wait for this rank
                self._send_broken(self._broken)
            self._announce_leaving()

        self._inbox.call_soon(begin)
        while not self._finished.wait(0.05):
            if interrupted():
                return False
        self._thread.join()
        return self._broken is None

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Start recording on all ranks, on rank 0; stops an earlier timeline. Raises OSError for a bad `path`."""
        self.stop_timeline()
        file = TimelineFile(path, self._clock_offsets_us)
        if not self._call_and_wait(lambda done: self._recording.start(file, mark_cycles, done)):
            file.close()
            raise errors.CollectiveError(f"start_timeline: {self._broken or 'the engine has ended'}")

    def _call_and_wait(self, callback: Callable[[Callable[[], None]], None], timeout_s: float = math.inf) -> bool:
        """Run `callback(done)` in the engine's thread, and wait until it calls `done`; False if it does not in time."""
        done = threading.Event()
        until_s = time.monotonic() + timeout_s
        self._inbox.call_soon(lambda: self._run_side_job(TIMELINE, lambda: callback(done.set)))
        while not done.wait(0.05):
            if self._finished.is_set() or TIMELINE in self._failed_jobs or time.monotonic() > until_s:
                return False
        return True

    def stop_timeline(self, timeout_s: float = 5.0) -> None:
        """Stop recording, on rank 0; returns when all ranks' events are in the file, or after `timeout_s`."""
        if not self._call_and_wait(self._recording.stop, timeout_s):
            self._inbox.call_soon(self._recording.close)

    # The engine's thread

    def _run(self) -> None:
        try:
            while not self._may_end():
                if self._poll():
                    self._moved_s = time.monotonic()
                else:
                    self._inbox.idle_wait(self._moved_s, self._waits_for())
        except BaseException as exc:  # whatever it was, the user's threads must not wait for this one
            self._break(exc)
        finally:
            self._run_side_job(TIMELINE, self._recording.close)
            self._finished.set()

    def _run_side_job(self, job: str, work: Callable[[], None]) -> None:
        """Do a side job's work; if it fails, log a warning, and end this side job."""
        if job in self._failed_jobs:
            return
        try:
            work()
        except Exception as exc:
            self._failed_jobs.add(job)
            why = f"{type(exc).__name__}: {exc}"
            LOGGER.warning(f"{job} of rank {self.world.rank} failed, and ends; the job goes on: {why}")

    def _poll(self) -> bool:
        """Do what can be done without waiting; True when anything moved."""
        moved = self._inbox.run_callbacks()
        moved |= self._announce()
        moved |= self._receive()
        moved |= self._decide()
        for state in list(self.states.values()):
            moved |= state.advance(self._inbox.latency_critical)
        if not any(state.busy for state in self.states.values()):
            self._run_side_job(TIMELINE, self._recording.finish_stop)
        self._run_side_job(TIMELINE, self._recording.flush)
        self.gpu.sweep()
        if not moved:
            self._run_side_job(STALL_WATCH, self._stalls.poll)
        return moved

    def _announce(self) -> bool:
        """Announce new submissions to the coordinators."""
        submissions = self._inbox.take()
        if not submissions:
            return False
        self._timeline.cycle()
        if self._traces:
            LOGGER.log(TRACE, f"rank {self.world.rank} announces {_named([each.signature for each in submissions])}")
        by_set: dict[int, list[Submission]] = {}
        for submission in submissions:
            by_set.setdefault(submission.process_set, []).append(submission)
        for number, own in by_set.items():
            state = self.states.get(number)
            if state is not None and not state.closed:
                self._send_announcement(state, self._announcement(state, own))
        return True

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
            self._send_control(encode(announcement), state.leader)
        else:
            self._receive_announcement(state.coordinator, self.world.rank, announcement)

    def _send_control(self, content: bytes, rank: int) -> None:
        self.control_messages += 1
        self.control_bytes += len(content)
        self.transport.send_control(content, rank)

    def _receive_announcement(self, coordinator: Coordinator, rank: int, announcement: Announcement) -> None:
        if announcement.leave and announcement.process_set == GLOBAL:
            self._left.add(rank)
        coordinator.announce(rank, announcement)
        if self._timeline.recording:
            for record in announcement.records:
                self._timeline.ready(record.signature, rank)
            for number in numbers(announcement.bits):
                self._timeline.ready(coordinator.signature(number), rank)

    def _receive(self) -> bool:
        messages = self.transport.recv_control()
        for message in messages:
            self._dispatch(message)
        return bool(messages)

    def _dispatch(self, message: ControlMessage) -> None:
        content = decode(message.content)
        if isinstance(content, Announcement | Response):
            state = self.states.get(content.process_set)
            if content.process_set >= self._next_set:
                self._early.setdefault(content.process_set, []).append(message)
            elif state is None:
                return  # the process set was removed
            elif isinstance(content, Response):
                self._apply(state, content)
            elif state.coordinator is not None:
                self._receive_announcement(state.coordinator, message.source, content)
        elif isinstance(content, protocol.ShutdownAck):
            self._shutdown_acked = True
        elif isinstance(content, protocol.Broken):
            self._fail_all(errors.PeerLostError(content.message, [message.source]))
        elif isinstance(content, protocol.StallProbe | StackRequest | protocol.StackReply):
            self._run_side_job(STALL_WATCH, lambda: self._stalls.receive(message.source, content))
        elif isinstance(content, protocol.TimelineStart | protocol.TimelineStop | protocol.TimelineEvents):
            self._run_side_job(TIMELINE, lambda: self._recording.receive(message.source, content))

    def _decide(self) -> bool:
        moved = False
        for state in list(self.states.values()):
            response = state.coordinator.decide() if state.coordinator is not None else None
            if response is not None:
                self.send_response(state, response)
                moved = True
        return moved

    def send_response(self, state: ProcessSetState, response: Response) -> None:
        """Send a coordinator's response to all members, and apply it on this rank."""
        content = encode(response)
        for rank in state.members:
            if rank != self.world.rank:
                self._send_control(content, rank)
        self._apply(state, response)

    def _apply(self, state: ProcessSetState, response: Response) -> None:
        """Do what the coordinator has decided."""
        if self._broken is not None:  # a rank's Broken may arrive before the response that it failed to run
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
                what = f"rank {self.world.rank}, process set {state.number}, response {response.number}"
                LOGGER.debug(f"{what}: {_named(signatures)}")
            self._queue(state, signatures, divisor)
        if response.all_joined >= 0:
            self._queue_join(state, response.all_joined)
        if response.closed:
            self._close(state, response.closed, response.leaver)

    def _queue(self, state: ProcessSetState, signatures: Sequence[Signature], divisor: int) -> None:
        submissions = []
        with self._inbox.lock:
            for signature in signatures:
                submission = state.pending.pop(signature.key, None)
                if submission is None:
                    if not state.joined:
                        raise AssertionError(
                            f"rank {self.world.rank} did not submit {signature.key!r}, but must run it"
                        )
                    submission = neutral_submission(signature, state.number, self.gpu)
                submission.begin(state.running, self._inbox.lock)
                submissions.append(submission)
        for submission in submissions:
            self._timeline.agreed(submission)
        others = [each for each in submissions if each.signature.kind not in SET_CHANGES]
        state.enqueue(operations.run(others, state.context, divisor))
        for submission in submissions:
            if submission.signature.kind in SET_CHANGES:
                state.enqueue(self._change_sets(submission))

    def _queue_join(self, state: ProcessSetState, last: int) -> None:
        """Let join() return when the operations queued before are done."""
        with self._inbox.lock:
            self.joins += 1
            state.joined = False
            state.submitted = 0  # a rank that joined early has numbered fewer submissions than the others
            submission = state.pending.pop("join.join")
            submission.begin(state.running, self._inbox.lock)
        submission.payload = last
        state.enqueue(operations.run([submission], state.context, 1))

    def _fail(self, state: ProcessSetState, failure: Failure) -> None:
        with self._inbox.lock:
            submission = state.pending.pop(failure.key, None)
            self._inbox.drop(lambda each: each is submission)
        if submission is not None:
            submission.fail(getattr(errors, failure.kind)(failure.message))

    def _add_set(self, members: Sequence[int]) -> int:
        """Make a process set; all ranks of the world do so in the same order, so its number is equal on all."""
        resources = self.host.reserve(members)
        with self._inbox.lock:
            number = self._next_set
            self._next_set += 1
            self.sets[number] = tuple(members)
            if self.world.rank in members:
                coordinator = None
                if members[0] == self.world.rank:
                    coordinator = Coordinator(number, members, self.world.size, self.settings.cache_capacity)
                shared = self.settings, self.memory, self._timeline, self.gpu, self._debugs
                context = Context(self.host.algorithms(resources, members), tuple(members), *shared)
                self.states[number] = ProcessSetState(number, context, coordinator)
        for message in self._early.pop(number, []):
            self._dispatch(message)
        if self._leaving and number in self.states:
            self._send_announcement(self.states[number], Announcement(number, 0, leave=self._leaving))
        return number

    def _change_sets(self, submission: Submission) -> Steps[None]:
        """Make or remove a process set; queued, so that all ranks do it in the same order.

        A set is removed when its operations on this rank have ended: only then another set may use its tags.
        """
        try:
            if submission.signature.kind == "add_process_set":
                submission.payload = self._add_set(submission.signature.detail("ranks"))
            else:
                number = submission.signature.detail("process_set")
                state = self.states.get(number)
                if state is not None:
                    self._close(state, f"process set {number} was removed", -1)
                    yield Idle(state)
                    yield from state.algorithms.gpu.release()
                with self._inbox.lock:
                    self.states.pop(number, None)
                    members = self.sets.pop(number, None)
                if members is not None:
                    self.host.release(members)
        except errors.InputError as exc:
            submission.fail(exc)
        else:
            submission.complete()

    def _waits_for(self) -> WaitsFor:
        """What this rank must poll for."""
        states = list(self.states.values())
        if any(state.waits_for is not None and not isinstance(state.waits_for, Arrival) for state in states):
            return WaitsFor.MESSAGES
        if any(state.busy for state in states):
            return WaitsFor.FLAGS
        if (
            bool(self._leaving)
            or self._inbox.announced(sum(len(state.pending) for state in states))
            or self._stalls.attentive
            or self._recording.busy
            or self.gpu.keeps
            or not self.transport.flushed()
        ):
            return WaitsFor.CONTROL
        return WaitsFor.NOTHING

    def doing(self, request: StackRequest) -> str:
        """This rank's last submission, what it waits for, and whether a stalled name waits in another process set."""
        with self._inbox.lock:
            text = self._inbox.last_submission_text()
            waiting = [submission for state in self.states.values() for submission in state.pending.values()]
        if waiting:
            names = ", ".join(f"{each.signature.kind} {each.signature.name!r}" for each in waiting[:3])
            text += f", and waits for {names}" + (f" and {len(waiting) - 3} more" if len(waiting) > 3 else "")
        for each in waiting:
            (kind, name, *_), number = each.signature, each.process_set
            if name in request.names and (number, kind) != (request.process_set, request.kind):
                text += f"; it submitted {kind} {name!r} ({each.line}) to process set {number}"
                text += f" ({ranks_text(self.sets[number])})"
                return f"{text}: all ranks must pass the same operation and the same process set"
        return text

    def waiting_for(self) -> str:
        """What threads of this rank wait for, as `allreduce 'layer3.w' (train.py:41)`; empty for nothing."""
        with self._inbox.lock:
            lines = {id(each.handle): each.line for each in self._unfinished()}
            handles = self._inbox.waited_for()
        texts = [
            f"{each.signature.kind} {each.signature.name!r} ({lines[id(each)]})"
            for each in handles
            if id(each) in lines  # not one that has just been completed
        ]
        if self._leaving and not texts:
            return f"the others to leave too: {self._leaving}"
        more = f", and {len(texts) - NAMED_WAITS} more" if texts[NAMED_WAITS:] else ""
        return ", ".join(texts[:NAMED_WAITS]) + more

    def _unfinished(self) -> list[Submission]:
        """All pending and running submissions; with the lock held."""
        states = list(self.states.values())
        return [each for state in states for each in (*state.pending.values(), *state.running.values())]

    # The end

    def _announce_leaving(self) -> None:
        """Send the last announcement to every process set; earlier announcements stay valid."""
        self._announce()
        self._timeline.stop()
        self._run_side_job(TIMELINE, lambda: self._recording.send(last=True))
        for state in list(self.states.values()):
            self._send_announcement(state, Announcement(state.number, state.seen, leave=self._leaving))

    def _may_end(self) -> bool:
        if self._broken is not None:
            return bool(self._leaving)
        if not self._leaving or any(state.busy for state in self.states.values()):
            return False
        if self.world.rank == 0 and not self._shutdown_acked and len(self._left) == self.world.size:
            self._send_others(protocol.ShutdownAck())
            self._shutdown_acked = True
        # rank 0 does not know what the coordinators of other sets still run: their last responses close the sets
        return self._shutdown_acked and all(state.closed for state in self.states.values()) and self.transport.flushed()

    def _close(self, state: ProcessSetState, closed: str, leaver: int) -> None:
        """Close a process set: its pending submissions fail."""
        with self._inbox.lock:
            if not state.closed:
                state.closed, state.leaver = closed, leaver
            lost, state.pending = state.pending, {}
            self._inbox.drop(lambda each: each.process_set == state.number)
        for submission in lost.values():
            submission.fail(errors_for.never_complete(state, submission, self.world, self._leaving))

    def _break(self, exc: BaseException) -> None:
        """The engine itself failed: no rank can complete this rank's operations."""
        error = errors.CollectiveError(
            f"rank {self.world.rank} of {self.world.size} failed inside an operation: {type(exc).__name__}: {exc}"
        )
        error.__cause__ = exc
        self._fail_all(error)
        with contextlib.suppress(Exception):  # what failed may be MPI itself
            self._send_broken(error)

    def _send_broken(self, error: Exception) -> None:
        self._send_others(protocol.Broken(str(error)))
        until_s = time.monotonic() + BROKEN_SEND_S
        while not self.transport.flushed() and time.monotonic() < until_s:
            time.sleep(LONGEST_SLEEP_S)

    def fail_everything(self, message: str) -> None:
        """Fail all pending and running submissions with StalledError."""
        self._fail_all(errors.StalledError(message))

    def _fail_all(self, error: Exception) -> None:
        with self._inbox.lock:
            self._broken = error
            lost = self._unfinished()
            self._inbox.drop(lambda _: True)
            for state in self.states.values():
                state.clear()
        with contextlib.suppress(Exception):  # what failed may be MPI itself
            self.transport.cancel_receives()
        for submission in lost:
            submission.fail(error)
        self.gpu.abort()

    def _send_others(self, message: protocol.ShutdownAck | protocol.Broken) -> None:
        for rank in range(self.world.size):
            if rank != self.world.rank:
                self.transport.send_control(encode(message), rank)


def _named(signatures: Sequence[Signature]) -> str:
    """The first operations, for the log."""
    names = [f"{each.kind} {each.name!r}" for each in signatures[:NAMED_IN_LOG]]
    more = len(signatures) - NAMED_IN_LOG
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
