"""Polls the services of an engine: in its own thread, or for a moment in a caller's that waits for a result."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ringreduce.engine.channels import Channels
from ringreduce.engine.inbox import Inbox
from ringreduce.execution.submission import Handle
from ringreduce.transport.waiting import WaitsFor

DRIVE_S = 5e-3  # how long a thread that waits polls for itself: a handover costs nothing beside what takes longer
TAKE_OVER_S = 1e-3  # how long it waits for the engine's thread to stop polling; that may be moving much data
FULL_POLLS = 4  # every fourth poll in which nothing moves is one of all services


class Polled(Protocol):
    """What can be polled."""

    def poll(self) -> bool:
        """Do what can be done without waiting; True when anything moved."""


class Service(Polled, Protocol):
    """What must also be polled for what this rank's own threads do not bring."""

    def waits_for(self) -> WaitsFor:
        """What must be polled for, when nothing moves."""


class Polling:
    """Only the thread that holds `lock` polls.

    It alone touches what it polls: negotiation, operations, messages, the stall watch, the timeline, the GPU. Where no
    docstring of these says that any thread may call something, only the holder of this lock may. What the user's
    threads share with it (submissions, process sets, channels, why the engine ends) it changes with the inbox's lock
    held, too.
    """

    def __init__(
        self,
        news: Sequence[Service],
        work: Sequence[Service],
        others: Sequence[Service],
        inbox: Inbox,
        on_error: Callable[[BaseException], object],
        channels: Channels,
    ) -> None:
        """A thread that waits polls the others less often: polls take time from ranks on the same core.

        news: between hosts, through which messages come;  work: what follows them, and submissions.
        channels: whose operations need nothing else.
        on_error: may be called again.
        """
        self.lock = threading.Lock()
        self.moved_s = time.monotonic()  # when anything moved last
        self._work: Sequence[Polled] = work
        self._first: Sequence[Polled] = [*news, *work]
        self._services: Sequence[Polled] = [inbox, *news, *work, *others, channels]
        self._waiting: Sequence[Service] = [*work, *news, *others]
        self._between_hosts = bool(news)
        self._inbox, self._on_error, self._channels = inbox, on_error, channels.by_number

    def poll(self) -> bool:
        """Poll all services; True when anything moved."""
        return self._poll(self._services)

    def _poll(self, services: Sequence[Polled]) -> bool:
        moved = False
        try:
            for each in services:
                moved |= each.poll()
        except BaseException as exc:  # also KeyboardInterrupt: what it has interrupted cannot go on
            self._on_error(exc)  # while nobody else can poll what has failed
            raise
        if moved:
            self.moved_s = time.monotonic()
        return moved

    def waits_for(self) -> WaitsFor:
        """What must be polled for, when nothing moves."""
        return max([each.waits_for() for each in self._waiting])

    def _is_idle(self) -> bool:
        for each in self._waiting:  # noqa: SIM110, a generator takes twice the time
            if each.waits_for():
                return False
        return True

    def drive(self, handle: Handle) -> bool:
        """Poll in the caller's thread for up to DRIVE_S; the engine's sleeps meanwhile, so they need not switch.

        Returns: True when the handle is done, and nothing is left for the engine's thread.
        """
        if not self._inbox.driving.acquire(blocking=False):
            return False
        try:
            if not self.lock.acquire(timeout=TAKE_OVER_S):
                return False
            try:
                self._poll_until(handle)
                return handle.ended and not self._inbox.holds_any() and self._is_idle()
            except Exception:
                if not handle.ended:  # else a service has failed, and with it the handle
                    raise
                return False
            finally:
                self.lock.release()
        finally:
            self._inbox.driving.release()

    def _poll_until(self, handle: Handle) -> None:
        first, work = self._first, self._work
        if handle.process_set in self._channels:
            first = work = [self._channels[handle.process_set]]
        if self._between_hosts:
            self._poll(work)  # announces the submission, before MPI yields the core
        number, until_s = 0, time.monotonic() + DRIVE_S
        while not handle.ended and time.monotonic() < until_s:
            number += 1
            if not self._poll(first if number % FULL_POLLS else self._services):
                os.sched_yield()  # each time: another rank on this core may have work to do
