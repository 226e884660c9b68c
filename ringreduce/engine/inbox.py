"""What the user's threads hand to the engine's thread, and when that rests: the only place where the two meet.

Tensors gather here for a while, unless they fill a batch or somebody waits for one: few control messages tell of many.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from ringreduce.engine.signature import Signature
from ringreduce.engine.submission import Handle, Submission
from ringreduce.settings import Settings
from ringreduce.transport.base import EngineTransport


class WaitsFor(enum.Enum):
    """What an engine waits for."""

    NOTHING = 0
    CONTROL = 1
    """Other ranks' control messages."""
    FLAGS = 2
    """What other ranks do in shared memory."""
    MESSAGES = 3
    """Long messages, which MPI moves only while it is called."""


YIELD_S = 10e-3
"""While somebody waits for a result, and something moved a moment ago, only the core is given away.

Not while flags are waited for: the process set has looked for them before, and a turn takes the core from who is to set
them.
"""
FIRST_SLEEP_S = {WaitsFor.NOTHING: 1e-3, WaitsFor.CONTROL: 1e-3, WaitsFor.FLAGS: 1e-3, WaitsFor.MESSAGES: 50e-6}
CRITICAL_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 40e-3
SLEEP_SHARE, LAZY_SLEEP_SHARE = 0.05, 0.25
"""Rests are this share of the time for which nothing has moved: what they add to a wait is small against it.

When nobody waits the cores are the user's: a look costs as much as summing some ten thousand elements."""
BATCH_SLOTS, ONE_HOST_BATCH_SLOTS = 4, 16
"""So many slots full of tensors are told of at once: to agree costs the same for one as for a hundred. Between hosts
fewer, so that the wire begins to work early."""
OVERSUBSCRIBED_CYCLES = 5
"""Where the ranks leave no core of their only host free, moving data while the user computes takes longer than moving
it afterwards: gather so much longer, and any number of bytes. A training step of 230 ms was 7 to 11 % longer than its
computing, and 10 to 13 % without this."""
LONGEST_IDLE_REST_S = 1.0
"""A rank that waits for nothing looks for control messages after 40 ms, and then, as long as nothing comes, ever more
seldom: MPI can only be polled, and a look takes some 50 µs. Its own threads wake it at once."""


class Inbox:
    """One engine's. `lock` also guards what the engine shares with the user's threads besides."""

    def __init__(
        self, transport: EngineTransport, settings: Settings, one_host: bool, oversubscribed: bool = False
    ) -> None:
        """one_host: all ranks are on it;  crowded: and all its cores are taken by them."""
        self.lock = threading.Lock()
        self.draining = False
        """Nothing more will come: do not gather."""
        self._last: tuple[Signature, str, float] | None = None
        """Description, line and time of the last submission; not the submission, whose tensors are the user's to
        free."""
        self._transport = transport
        self._batch_bytes = (ONE_HOST_BATCH_SLOTS if one_host else BATCH_SLOTS) * settings.fusion_slot_bytes
        self._cycle_s = settings.cycle_time_ms / 1e3
        self._oversubscribed = one_host and oversubscribed
        self._defers = False
        self._submissions: list[Submission] = []
        self._until_s = 0.0
        """So long what is there is gathered, at most."""
        self._nbytes = 0
        self._urgent = False
        """A thread that submitted one of them waits for it."""
        self._callbacks: deque[Callable[[], None]] = deque()
        self._waiting: list[Handle] = []
        """Those that threads wait for."""
        self._asleep = False
        self._batching = False
        """The engine rests to gather more: another submission is no reason to wake it."""

    # Called by the user's threads

    def put(self, submission: Submission) -> None:
        """Hand in a submission; with `lock` held. `announce_soon` must follow without it."""
        if not self._submissions:
            on_gpu = (
                bool(submission.inputs) and submission.inputs[0].device != "cpu"
            )  # there nobody takes cores from anybody
            self._defers = self._oversubscribed and not on_gpu
            cycles = OVERSUBSCRIBED_CYCLES if self._defers else 1
            self._until_s, self._nbytes = submission.submitted_s + cycles * self._cycle_s, 0
        self._submissions.append(submission)
        for each in submission.inputs:
            self._nbytes += each.nbytes
        self._urgent |= submission.waits
        self._last = submission.signature, submission.line, submission.submitted_s

    def announce_soon(self) -> None:
        """Wake the engine, unless it gathers."""
        if not (self._batching and self.batches_more()):
            self._wake()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Have the engine's thread do something."""
        with self.lock:
            self._callbacks.append(callback)
        self._wake()

    def ask(self) -> None:
        """Somebody wants to know whether a handle is done: do not gather, as if he waited."""
        with self.lock:
            self._urgent |= bool(self._submissions)
        self._wake()

    def wait(self, handle: Handle) -> None:
        """Block until the handle is done; the engine does not gather meanwhile."""
        with self.lock:
            self._waiting.append(handle)
        self._wake()
        try:
            handle.block()
        finally:
            with self.lock:
                self._waiting.remove(handle)

    def waited_for(self) -> list[Handle]:
        """What threads wait for, the longest first; with `lock` held."""
        return list(self._waiting)

    def _wake(self) -> None:
        if self._asleep:
            self._transport.wake()

    # Called by the engine's thread

    def run_callbacks(self) -> bool:
        """Do what was ordered; True when anything was."""
        ran = False
        while self._callbacks:
            self._callbacks.popleft()()
            ran = True
        return ran

    @property
    def latency_critical(self) -> bool:
        """True while somebody waits for a result: latency counts. Else the cores are the user's."""
        return bool(self._waiting) or self._urgent

    def batches_more(self) -> bool:
        """True while more may come, nobody waits for what is there, and it does not fill a batch yet."""
        if self._waiting or self._urgent or self.draining:
            return False
        if self._nbytes >= self._batch_bytes and not self._defers:
            return False
        return time.monotonic() < self._until_s

    def take(self) -> list[Submission]:
        """What is to be announced now."""
        if not self._submissions or self.batches_more():
            return []
        with self.lock:
            submissions, self._submissions, self._urgent = self._submissions, [], False
        return submissions

    def drop(self, is_lost: Callable[[Submission], bool]) -> None:
        """Forget submissions that have failed before they were announced; with `lock` held."""
        self._submissions = [each for each in self._submissions if not is_lost(each)]

    def last_submission_text(self) -> str:
        """What this rank did last, for a stall report."""
        if self._last is None:
            return "has submitted nothing yet"
        (kind, name, *_), line, when_s = self._last
        return f"last submitted {kind} {name!r} ({line}) {time.monotonic() - when_s:.0f} s ago"

    def announced(self, pending: int) -> bool:
        """True when some of this rank's `pending` submissions are not gathered here any more."""
        return pending > len(self._submissions)

    def idle_wait(self, moved_s: float, waits: WaitsFor) -> None:
        """Rest until there may be something to do.

        moved_s: when anything moved last;  waits: for what this rank waits.
        """
        now = time.monotonic()
        with self.lock:
            batches_more = bool(self._submissions) and self.batches_more()
            if self._callbacks or (self._submissions and not batches_more):
                return
            latency_critical = self.latency_critical
            self._asleep, self._batching = True, batches_more
        if waits is WaitsFor.NOTHING and not batches_more:
            idle_s = LAZY_SLEEP_SHARE * (now - moved_s)
            self._transport.sleep(min(max(idle_s, LONGEST_SLEEP_S), LONGEST_IDLE_REST_S))
        elif latency_critical and waits is not WaitsFor.FLAGS and now - moved_s < YIELD_S:
            os.sched_yield()
        else:
            share, first_s = SLEEP_SHARE, CRITICAL_SLEEP_S
            if not latency_critical:
                share, first_s = LAZY_SLEEP_SHARE, FIRST_SLEEP_S[waits]
            sleep_s = min(max(share * (now - moved_s), first_s), LONGEST_SLEEP_S)
            if batches_more:
                left_s = max(0.0, self._until_s - now)
                sleep_s = left_s if waits is WaitsFor.NOTHING else min(sleep_s, left_s)
            self._transport.sleep(sleep_s)
        self._asleep = self._batching = False
