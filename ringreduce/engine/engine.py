"""The engine: one thread per process that polls its services: negotiation, the process sets' operations, and others.

It never blocks inside an operation: collectives are generators, and every process set has a queue of its own, so
overlapping sets cannot deadlock. A service says what must be polled for when nothing moves. A caller's thread that
waits polls for a moment itself (polling.py).

With nothing pending the thread sleeps until a submission, and looks for messages every 40 ms.

However the thread ends, it sets `_ended`, so that nobody waits for it for ever.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce import errors
from ringreduce.collectives import fusion
from ringreduce.engine.channels import Channels
from ringreduce.engine.express import Express
from ringreduce.engine.inbox import LONGEST_SLEEP_S, Inbox, may_be_interrupted
from ringreduce.engine.negotiation import Negotiation
from ringreduce.engine.polling import Polling, Service
from ringreduce.engine.process_sets import ProcessSets
from ringreduce.engine.stalls import StallWatch
from ringreduce.engine.submitting import Submitting
from ringreduce.execution.context import Context
from ringreduce.execution.executor import Executor
from ringreduce.execution.host import HostResources
from ringreduce.execution.lane import Lane
from ringreduce.execution.steps import StepRecorder
from ringreduce.execution.submission import Handle
from ringreduce.execution.timeline import Timeline
from ringreduce.gpu.backend import CudaBackend
from ringreduce.gpu.stream import Gpu
from ringreduce.monitor import launcher_link, loaders
from ringreduce.monitor.recording import Recording
from ringreduce.monitor.reporting import Reporting, about
from ringreduce.negotiation.ending import Ending
from ringreduce.negotiation.mailbox import Mailbox
from ringreduce.negotiation.neutral import neutral_submission
from ringreduce.negotiation.protocol import JOIN, Broken
from ringreduce.settings import Settings
from ringreduce.settings.log import LOGGER
from ringreduce.transport.base import EngineTransport
from ringreduce.transport.traffic import Traffic
from ringreduce.transport.waiting import WaitsFor
from ringreduce.transport.world import World

BROKEN_SEND_S = 1.0  # how long an engine that failed tries to notify the others


class Engine:
    """One rank's engine. Any thread may call `submit`, `leave`, and what `timeline` and `stalls` allow."""

    def __init__(
        self,
        world: World,
        transport: EngineTransport,
        settings: Settings,
        host: HostResources,
        clock_offsets_us: Sequence[float] = (),
        process_sets: Sequence[Sequence[int] | str] = (),
    ) -> None:
        """clock_offsets_us: by rank, how far its clock is ahead of rank 0's; by default 0.
        process_sets: the members of further process sets, the same on all ranks; or why a set has ended.
        """
        self.world, self.transport, self.settings, self.host = world, transport, settings, host
        self.fusion_buffer = fusion.FusionBuffer(settings.fusion_buffer_bytes // 2, settings.fusion_slot_bytes)
        self.gpu = Gpu(world)
        self.mailbox = mailbox = Mailbox(transport)
        one_host = len(set(world.hosts)) == 1
        self._inbox = inbox = Inbox(transport, settings, one_host, not host.overlaps)
        timeline = Timeline()
        self.recorder = recorder = StepRecorder()
        self.ending = ending = Ending(world, mailbox, inbox.lock)
        neutral = functools.partial(neutral_submission, on_gpu=self.gpu.filled)
        self.negotiation = negotiation = Negotiation(world, settings, mailbox, inbox, ending, timeline, neutral)
        self.states = negotiation.states
        busy: dict[Executor, None] = {}
        own: dict[str, Any] = {"settings": settings, "fusion_buffer": self.fusion_buffer, "timeline": timeline}
        make = functools.partial(Context, make_gpu=functools.partial(CudaBackend, self.gpu), busy=busy, **own)
        self.channels = Channels(world, host, inbox, ending, self.states, make, transport.in_flight.sweep)
        self.process_sets = ProcessSets(world, host, inbox, mailbox, negotiation, ending, self.channels, make, busy)
        self.submitting = Submitting(world, inbox, ending, self.process_sets, self.gpu.check, recorder)
        self.submit = self.submitting.submit
        self._ended, offsets = threading.Event(), clock_offsets_us or [0.0] * world.size
        followed, has_run = negotiation.followed, self.process_sets.has_run
        self.timeline = Recording(mailbox, timeline, followed, has_run, inbox.call_soon, ending, self._ended, offsets)
        self.stalls = StallWatch(settings, mailbox, inbox, ending, self.process_sets, self._stalled)
        mailbox.handlers[Broken] = lambda source, broken: self._fail_all(errors.PeerLostError(broken.message, [source]))
        others: list[Service] = [self.timeline, self.gpu, self.stalls]
        work: list[Service] = [negotiation, self.process_sets]
        news, others = ([], [mailbox, *others]) if one_host else ([mailbox], others)
        self._polling = Polling(news, work, others, inbox, self._break, self.channels)
        inbox.drive = self._drive
        self.process_sets.begin(process_sets)
        of_express = busy, inbox, ending, negotiation, self.submitting, recorder, timeline
        self.express = Express(self._polling.lock, self._break, *of_express)
        self._clock_ahead_us = offsets[world.rank]
        self.reporting: Reporting | None = None
        if settings.report:
            self.report(math.inf)
        self._thread = threading.Thread(target=self._run, name=f"ringreduce engine {world.rank}", daemon=True)
        self._thread.start()

    def lane(self, number: int) -> Lane | None:
        """The lane of a channel; None where it has none."""
        channel = self.channels.by_number.get(number)
        if channel is None:
            return None
        state = self.recorder, self.submitting, self.ending
        return Lane(channel, self._polling.lock, self._break, may_be_interrupted, *state)

    def record(self, always: bool = True) -> None:
        """Record what each step waits for, from now on.

        always: record until the engine ends, not only while the launcher asks for reports.
        """
        if not self.recorder.recording:
            self.transport.traffic = Traffic()
            loaders.watch(self.recorder)
        self.recorder.start(always)

    def report(self, for_s: float) -> None:
        """Record steps and report them to ringrun, for at least this many seconds from now; 0: only count them, now."""
        if not for_s:
            if self.reporting:
                self.reporting.only_count()
            return
        if (self.reporting and self.reporting.prolong(for_s)) or self._ended.is_set():
            return
        self.record(always=False)
        algorithms, buffer_bytes = self.states[0].algorithms, self.fusion_buffer.total_bytes
        header = about(self.host, self.settings, algorithms, self._clock_ahead_us)
        self.reporting = Reporting(self.recorder, self.transport, self.host, header, algorithms, buffer_bytes, for_s)

    def leave(self, why: str, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Announce that this rank leaves, and wait until all ranks do; operations that are not ready fail.

        Returns: False when `interrupted()` became true first, or the engine had failed.
        Cost:    2 control messages for each rank but 0, to and from rank 0.
        """
        self._inbox.call_soon(lambda: self._begin_leaving(why))
        while not self._ended.wait(0.05):
            if interrupted():
                return False
        self._thread.join()
        return self.ending.error is None

    def give_up(self, error: Exception) -> None:
        """Fail everything, and end without the other ranks; any thread may call it, and then `join`."""

        def end() -> None:
            self._fail_all(error)
            self.ending.given_up = True

        self._inbox.call_soon(end)

    def is_not_here(self, why: str) -> None:
        """This process is a forked child, without the engine's thread: its waits raise, and poll nothing of MPI's."""
        self._inbox.not_here = why

    def join(self) -> None:
        """Wait for the end of the engine's thread, after `give_up`."""
        self._thread.join()

    def _begin_leaving(self, why: str) -> None:
        self._inbox.draining = True
        with self._inbox.lock:  # what another thread is submitting is announced now, or refused
            self.ending.leaving = why
        if not self.settings.elastic:  # there ringrun looks who leaves, and wakes who is stopped meanwhile
            self.ending.leaving_s = time.monotonic()
        if isinstance(self.ending.error, errors.StalledError):  # the others may not know, and would wait
            self._send_broken(self.ending.error)
        self.negotiation.announce()
        self.timeline.finish()
        self.negotiation.announce_leaving()

    # The engine's thread

    def _run(self) -> None:
        try:
            while True:
                with self._polling.lock:
                    if self.ending.may_end(self.process_sets.all()):
                        break
                    waits = None if self._polling.poll() else self._polling.waits_for()
                if waits is not None or self._inbox.driving.locked():
                    self._inbox.idle_wait(self._polling.moved_s, waits or WaitsFor.NOTHING)
        except BaseException as exc:  # whatever it was, the user's threads must not wait for this one
            self._break(exc)
        finally:
            with contextlib.suppress(Exception), self._polling.lock:  # whatever it is, see above
                self.transport.in_flight.abandon()
            self.timeline.close()
            if self.reporting is not None:
                self.reporting.close()
            self._ended.set()

    def _drive(self, handle: Handle) -> bool:
        """See `Polling.drive`.

        Not with a GPU, which other ranks may have while this one joins: each thread has its own current stream.
        """
        return not (self.gpu.is_used or handle.signature.kind == JOIN) and self._polling.drive(handle)

    # Failures

    def _break(self, exc: BaseException) -> None:
        """The engine itself failed: no rank can complete this rank's operations. Later failures change nothing."""
        if self.ending.error is not None:
            return
        error = errors.CollectiveError(
            f"rank {self.world.rank} of {self.world.size} failed inside an operation: {errors.described(exc)}"
        )
        error.__cause__ = exc
        if isinstance(exc, Exception):  # others, such as KeyboardInterrupt, reach the user
            self._log(error, exc)
        self._fail_all(error)
        if self.settings.elastic:
            return  # the launcher says who is lost: what MPI says of a dead rank comes earlier, and names none
        with contextlib.suppress(Exception):  # what failed may be MPI itself
            self._send_broken(error)

    def _log(self, error: Exception, exc: Exception) -> None:
        """Log an error, with its traceback unless a waiting thread raises it."""
        is_loss = self.settings.elastic and type(exc).__module__.startswith("mpi4py")
        with self._inbox.lock:
            is_raised = bool(self._inbox.waited_for())
        level = logging.DEBUG if is_loss or is_raised else logging.ERROR
        LOGGER.log(level, str(error), exc_info=None if is_raised else exc)

    def _send_broken(self, error: Exception) -> None:
        self.mailbox.send_others(Broken(str(error)))
        until_s = time.monotonic() + BROKEN_SEND_S
        while not self.mailbox.flushed() and time.monotonic() < until_s:
            time.sleep(LONGEST_SLEEP_S)

    def _stalled(self, error: errors.StalledError, ranks: Sequence[int]) -> None:
        """These ranks, perhaps this one, keep others waiting too long: in an elastic job the launcher ends them."""
        if self.settings.elastic:
            suspects = [self.world.origins[each] for each in ranks]
            launcher_link.report(self.settings.error_file, suspects=suspects, why=str(error))
        else:
            self._fail_all(error)
            if self.ending.leaving:  # the others wait for this rank, too
                self._send_broken(error)

    def _fail_all(self, error: Exception) -> None:
        self.ending.stop(error, self.process_sets.all())
        self.gpu.abort()
