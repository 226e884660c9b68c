"""Polls the services of an engine: in its own thread, or for a moment in a caller's that waits for a result."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ringreduce.engine.inbox import Inbox
from ringreduce.execution.submission import Handle
from ringreduce.negotiation.negotiation import GLOBAL
from ringreduce.transport.waiting import WaitsFor

DRIVE_S = 5e-3  # how long a thread that waits polls for itself: a handover costs nothing beside what takes longer
TAKE_OVER_S = 1e-3  # how long it waits for the engine's thread to stop polling; that may be moving much data
FULL_POLLS = 4  # every fourth poll in which nothing moves is one of all services


class Service(Protocol):
    """What is polled."""

    def poll(self) -> bool:
        """Do what can be done without waiting; True when anything moved."""

    def waits_for(self) -> WaitsFor:
        """What must be polled for, when nothing moves."""


class Polling:
    """Only the thread that holds `lock` polls."""

    def __init__(
        self,
        services: Sequence[Service],
        first: Sequence[Service],
        yields: bool,
        inbox: Inbox,
        on_error: Callable[[BaseException], object],
    ) -> None:
        """services: all, in the order in which they are polled.

        first:  those through which news comes: a thread that waits polls the others less often. Its polls take time
                from ranks on the same core that would end its wait. Operations in order need only the last one.
        yields: whether it yields the core after each poll, and not after those of all services only.
        """
        self.lock = threading.Lock()
        self.moved_s = time.monotonic()  # when anything moved last
        self._services, self._first, self._yields = services, first, yields
        self._inbox, self._on_error = inbox, on_error

    def poll(self) -> bool:
        """Poll all services; True when anything moved."""
        return self._poll(self._services)

    def _poll(self, services: Sequence[Service]) -> bool:
        moved = any([each.poll() for each in services])  # noqa: C419, a list: all are polled
        if moved:
            self.moved_s = time.monotonic()
        return moved

    def waits_for(self) -> WaitsFor:
        """What must be polled for, when nothing moves."""
        return max([each.waits_for() for each in self._services])

    def _is_idle(self) -> bool:
        return all(each.waits_for() is WaitsFor.NOTHING for each in self._services)

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
            finally:
                self.lock.release()
        except BaseException as exc:  # also KeyboardInterrupt: what it has interrupted cannot go on
            self._on_error(exc)
            if not isinstance(exc, Exception):
                raise
            return False
        finally:
            self._inbox.driving.release()

    def _poll_until(self, handle: Handle) -> None:
        first = self._first if handle.process_set >= GLOBAL else self._first[-1:]
        number, until_s = 0, time.monotonic() + DRIVE_S
        moved = self._yields  # true at first: the submission is to be announced
        while not handle.ended and time.monotonic() < until_s:
            number += 1
            is_full = (moved and self._yields) or number % FULL_POLLS == 0
            moved = self._poll(self._services if is_full else first)
            if not moved and (is_full or self._yields):
                os.sched_yield()
