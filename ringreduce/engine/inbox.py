"""Hands submissions from the user's threads to the engine's thread, and decides when that sleeps.

Submissions are batched for a while, unless they fill a batch or a thread waits: one announcement then covers many.
"""

from __future__ import annotations

import itertools
import operator
import os
import signal
import sys
import threading
import time
from _signal import getsignal  # type: ignore[import-not-found] # signal's own takes ten times as long
from collections import deque
from collections.abc import Callable

from ringreduce.errors import NotInitializedError
from ringreduce.execution.signature import Signature
from ringreduce.execution.steps import label
from ringreduce.execution.submission import Handle, Submission
from ringreduce.settings import Settings
from ringreduce.transport.base import EngineTransport
from ringreduce.transport.waiting import WaitsFor

YIELD_S = 10e-3
"""For this long after progress, an engine whose result a thread waits for only yields the core, and does not sleep.

Not while it waits for flags: those were just polled, and polling again would compete with the rank that sets them.
"""
FIRST_SLEEP_S = {WaitsFor.NOTHING: 1e-3, WaitsFor.CONTROL: 1e-3, WaitsFor.FLAGS: 1e-3, WaitsFor.MESSAGES: 50e-6}
CRITICAL_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 40e-3  # also of an idle engine, which its own threads wake; its polls cost 0.5 % of a core
SLEEP_SHARE, LAZY_SLEEP_SHARE = 0.05, 0.25
"""A sleep lasts this share of the time without progress, and so adds little to a wait. Longer (lazy) when no thread
waits: a poll costs the user's computation as much as summing some ten thousand elements."""
BATCH_SLOTS, ONE_HOST_BATCH_SLOTS = 4, 16
"""A batch is full with this many fusion slots of tensors: negotiation costs the same for one as for a hundred. Smaller
between hosts, so that sending begins early."""
OVERSUBSCRIBED_CYCLES = 5
"""Where the ranks use all cores of the only host, moving data during the user's computation takes longer than after it:
batch this many cycles, at any size. A training step of 230 ms was 7 to 11 % longer than its computation, and 10 to 13 %
without this."""
POLLS_FRAMES = 250  # more than a poll, with what it calls of the user's or of torch's, ever has on the stack
HAS_ENDED = operator.attrgetter("ended")
MOST_REFUSALS = 64  # that are remembered
UNHANDLED = signal.SIGKILL, signal.SIGSTOP, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)  # of the last, see below
SIGNALS = tuple(map(int, signal.valid_signals().difference(UNHANDLED)))  # an enum's member takes longer to convert
NOT_A_SCRIPTS = frozenset((int(signal.SIG_DFL), int(signal.SIG_IGN), None, signal.default_int_handler))


class Inbox:
    """The inbox of one engine. `lock` also guards the engine's other state that the user's threads share."""

    def __init__(
        self, transport: EngineTransport, settings: Settings, one_host: bool, oversubscribed: bool = False
    ) -> None:
        """one_host: all ranks are on one host.  oversubscribed: they use all its cores."""
        self.lock = threading.Lock()
        self.draining = False  # true: no more submissions follow, so do not batch
        self.last: tuple[Signature, str, float] | None = None
        """Signature, line and time of the last submission that was taken, but no reference to its tensors."""
        self._transport = transport
        self._batch_bytes = (ONE_HOST_BATCH_SLOTS if one_host else BATCH_SLOTS) * settings.fusion_slot_bytes
        self._cycle_s = settings.cycle_time_ms / 1e3
        self._long_cycles = self._cycle_s >= LONGEST_SLEEP_S
        self._oversubscribed = one_host and oversubscribed
        self._defers = False
        self._submissions: list[Submission] = []
        self._until_s = 0.0  # when the batch ends at the latest
        self._nbytes = 0
        self._urgent = False  # true: a thread waits for a submission of the batch
        self._callbacks: deque[Callable[[], object]] = deque()
        self._waiting: list[Handle] = []  # handles that threads wait for
        self.refusals: dict[str, str] = {}  # by name, why a call of this rank was refused
        self._asleep = False
        self.driving = threading.Lock()  # held while a thread that waits polls, or is about to
        self.drive: Callable[[Handle], bool] = lambda _: False
        """Polls in the calling thread until the handle is done, or for a moment; True when nothing is left to do."""
        self._batching = False  # true: the engine sleeps to batch more, so another submission need not wake it
        self.not_here = ""  # why nothing ends in this process: it is a forked child, which has the handles alone

    # Called by the user's threads

    def put(self, submission: Submission) -> None:
        """Add a submission, with `lock` held; call `announce_soon` after releasing it."""
        if not self._submissions:
            on_gpu = bool(submission.inputs) and submission.inputs[0].device != "cpu"  # needs no cores
            self._defers = self._oversubscribed and not on_gpu
            cycles = OVERSUBSCRIBED_CYCLES if self._defers else 1
            self._until_s, self._nbytes = submission.submitted_s + cycles * self._cycle_s, 0
        self._submissions.append(submission)
        if self.refusals:
            self.refusals.pop(submission.signature.name, None)
        if not self._defers:
            for each in submission.inputs:
                self._nbytes += each.nbytes
        if submission.waits:
            self._urgent = True

    def refused(self, name: str, why: str) -> None:
        """Note that a call of this name was refused; with `lock` held."""
        self.refusals[name] = why
        if len(self.refusals) > MOST_REFUSALS:
            del self.refusals[next(iter(self.refusals))]

    def announce_soon(self) -> None:
        """Wake the engine, unless it batches more; not for a thread that is about to wait, which wakes it if need be.

        An engine that sleeps looks for a new batch in time by itself, where cycles are not shorter than its sleep.
        """
        if self._asleep and (self._is_full or not (self._batching or self._long_cycles)):
            self.wake()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run a callback in the thread that polls (polling.py)."""
        self._callbacks.append(callback)
        self.wake()

    def on_poll(self) -> None:
        """A thread polls a handle: stop batching, as if it waited."""
        self._check_process()
        with self.lock:
            self._urgent |= bool(self._submissions)
        self.wake()

    def wait(self, handle: Handle, timeout_s: float = -1) -> None:
        """Block until the handle is done; the engine does not batch meanwhile. One of the threads that wait polls."""
        self._check_process()  # before the lock, which a thread of the parent's may have held
        with self.lock:
            self._waiting.append(handle)
        since_s = time.monotonic() if handle.recorder is not None else 0.0
        try:
            if may_be_interrupted() or not self.drive(handle):
                self.call_soon(lambda: None)  # a mere wake could come just before the engine's thread sleeps
            if not handle.ended:
                handle.block(timeout_s)
        finally:
            with self.lock:
                self._waiting.remove(handle)
            if handle.recorder is not None:
                handle.recorder.waited(label(handle.signature, handle.process_set), since_s)

    def _check_process(self) -> None:
        if self.not_here:
            raise NotInitializedError(f"a handle that was pending in its parent ends there only; {self.not_here}")

    def waited_for(self) -> list[Handle]:
        """The handles that threads wait for, the longest first; with `lock` held."""
        return list(self._waiting)

    def wake(self) -> None:
        """End the sleep of the engine's thread."""
        if self._asleep:
            self._asleep = False  # once is enough
            self._transport.wake()

    # Called by the thread that polls; `idle_wait` by the engine's own

    def poll(self) -> bool:
        """Run the callbacks of `call_soon`; True when there were any."""
        ran = False
        while self._callbacks:
            self._callbacks.popleft()()
            ran = True
        return ran

    @property
    def latency_critical(self) -> bool:
        """True while a thread waits for a result; otherwise the user's computation needs the cores."""
        return bool(self._waiting) or self._urgent

    def batches_more(self) -> bool:
        """True while the batch is not full, its time is not over, and no thread waits."""
        if self._waiting or self._urgent or self.draining:
            return False
        return not self._is_full and time.monotonic() < self._until_s

    @property
    def _is_full(self) -> bool:
        return self._nbytes >= self._batch_bytes and not self._defers

    def take(self) -> list[Submission]:
        """The batch to announce now, without what has failed; empty while it may grow."""
        if not self._submissions or self.batches_more():
            return []
        with self.lock:
            submissions, self._submissions, self._urgent = self._submissions, [], False
            last = submissions[-1]
            self.last = last.signature, last.line, last.submitted_s  # as `took`: a call less
        return [*itertools.filterfalse(HAS_ENDED, submissions)]

    def took(self, last: Submission) -> None:
        """Note the last submission, which came another way; with `lock` held."""
        self.last = last.signature, last.line, last.submitted_s

    def holds_any(self) -> bool:
        """True while submissions or callbacks wait for a poll."""
        return bool(self._submissions or self._callbacks)

    def last_submission_text(self) -> str:
        """This rank's last submission, for a stall report; with `lock` held."""
        if self._submissions:
            newest = self._submissions[-1]
            signature, line, when_s = newest.signature, newest.line, newest.submitted_s
        elif self.last is None:
            return "has submitted nothing yet"
        else:
            signature, line, when_s = self.last
        return f"last submitted {signature.text} ({line}) {time.monotonic() - when_s:.0f} s ago"

    def announced(self, pending: int) -> bool:
        """True when some of this rank's `pending` submissions have been announced."""
        return pending > len(self._submissions)

    def idle_wait(self, moved_s: float, waits: WaitsFor) -> None:
        """Sleep or yield until there may be work.  moved_s: when anything moved last."""
        now = time.monotonic()
        self._asleep = True  # first: who ends the reason for a sleep then looks here
        is_driven = self.driving.locked()
        with self.lock:
            batches_more = self._batching = bool(self._submissions) and self.batches_more()
            if not is_driven and (self._callbacks or (self._submissions and not batches_more)):
                self._asleep = False
                return
            latency_critical = self.latency_critical
        if is_driven or (waits is WaitsFor.NOTHING and not batches_more):
            self._transport.sleep(LONGEST_SLEEP_S)
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


def may_be_interrupted() -> bool:
    """True where a poll in this thread could be cut short, which no operation survives: the engine's thread must poll.

    The stack may be about to end here, or a function of the script's that traces may raise.
    """
    if sys.gettrace() or sys.getprofile():
        return True
    try:
        sys._getframe(sys.getrecursionlimit() - POLLS_FRAMES)
    except ValueError:  # as nearly always: there are not so many
        return has_signal_handlers()
    return True


def has_signal_handlers() -> bool:
    """True in the main thread of a script that handles a signal with its own function, or whose library does.

    That could run in the middle of a poll in this thread, and raise, as torch's does when a data loader's worker dies,
    or call a collective. Real-time signals are left out: to look at all takes twice as long.
    """
    try:
        if NOT_A_SCRIPTS.issuperset(map(getsignal, SIGNALS)):
            return False
    except TypeError:  # an object that cannot be hashed handles one
        pass
    return threading.get_ident() == threading.main_thread().ident
