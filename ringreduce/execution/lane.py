"""Short operations of a channel in the caller's thread: each is one call of the compiled module, not a submission.

What an operation needs is learned when one like it has gone the usual way. All ranks sign it as usual, so one that
takes the lane may work with one that submits. Where others are late, or have called something else, this rank submits
what it has signed: so errors, stalls and losses are those of submissions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ringreduce.collectives.compiled import PATIENCE_US
from ringreduce.execution.allreduce import travelling
from ringreduce.execution.channel import Channel, hash_of
from ringreduce.execution.in_slot import Gets, in_slot
from ringreduce.execution.steps import StepRecorder
from ringreduce.transport.base import Task
from ringreduce.transport.window import Region, Signatures

MOST_KNOWN = 1024
TAKE_OVER_S = 1e-3  # how long it waits for a look of the engine's thread to end; that may be moving much data


class Known(NamedTuple):
    """Operations that were learned."""

    run: Callable[..., int]  # of the compiled module's Exchange, or of several hosts' `Across.lane`
    signatures: Signatures | None
    region: Region | None
    slots: int  # that it uses
    in_python: bool  # it waits in Python: where the user's own code may run meanwhile, for a signal, it must not
    shape: tuple[int, ...]  # of its result
    what: tuple[str, str, int]  # its name, kind and bytes


class Lane:
    """The lane of one channel, on one rank.

    polling:  the lock of the thread that may run operations; on_error: called with what has interrupted one.
    is_unsafe: see inbox.may_be_interrupted.
    submitting: while it has `inspectors`, or counts what is `owed`, nothing is run here.
    """

    def __init__(
        self,
        channel: Channel,
        polling: threading.Lock,
        on_error: Callable[[BaseException], object],
        is_unsafe: Callable[[], bool],
        recorder: StepRecorder,
        submitting: Any,
    ) -> None:
        self._recorder, self._submitting = recorder, submitting
        self._is_unsafe = is_unsafe
        self._channel, self._polling, self._on_error = channel, polling, on_error
        self._executor, self._timeline = channel.executor, channel.executor.context.timeline
        self._known: dict[Hashable, Known] = {}

    def find(self, key: Hashable) -> Known | None:
        """What was learned of operations of this key."""
        try:
            return self._known.get(key)
        except TypeError:  # an argument that cannot be hashed, nor be right
            return None

    def learn(self, key: Hashable, submission: Any) -> None:
        """Learn from a finished operation to run those of this key."""
        channel, mine = self._channel, hash_of(submission.signature)
        kind, name, *_ = submission.signature.unnumbered
        what = name, kind, sum(each.nbytes for each in submission.inputs)
        if len(self._known) >= MOST_KNOWN:
            return
        shape = submission.outputs[0].shape if submission.outputs else ()
        if (across := channel.across) is not None:
            reduction = travelling(submission, across.most_bytes)
            run = across.lane(mine, reduction, self._keep) if reduction and submission.inputs[0].count else None
            if run is not None:
                is_first, signatures = across.transport is not None, channel.signatures if across.region else None
                self._known[key] = Known(run, signatures, across.region, not is_first, is_first, shape, what)
        elif (fits := in_slot(submission, channel.executor.context)) and channel.signatures:
            exchange = fits.compiled(channel.signatures, mine)
            if exchange is not None:
                slots = fits.gets is not Gets.NOTHING
                self._known[key] = Known(exchange.run, channel.signatures, fits.region, slots, False, shape, what)

    def _keep(self, task: Task[Any]) -> None:
        self._channel.crossing = task

    def run(self, known: Known, source: Any, target: Any) -> bool:
        """Run an operation; True when it is done, else it must be submitted."""
        polling, channel = self._polling, self._channel
        since_s = time.monotonic() if self._recorder.recording else None
        if not (polling.acquire(False) or polling.acquire(timeout=TAKE_OVER_S)):
            return False
        try:
            begun = channel.signed is not None or channel.crossing is not None
            watched = self._submitting.inspectors or self._submitting.owed > 0
            if begun or self._executor.busy or channel.closed or self._timeline.recording or watched:
                return False
            run, signatures, region, slots, in_python, _, what = known
            if in_python and self._is_unsafe():
                return False
            if signatures is None or region is None:
                done = run(source, target, 0, 0, PATIENCE_US) == 0
                channel.begun += done
                if since_s is not None:
                    self._recorder.passed(*what, since_s, "" if done else None)
                return done
            number = signatures.sequence
            state = run(source, target, number, region.sequence, PATIENCE_US)
            signatures.sequence = number + 1
            if since_s is not None:
                self._recorder.passed(*what, since_s, None if state else "shared")
            if state:
                channel.signed = number
                return False
            region.sequence += slots
            channel.begun += 1
            return True
        except (BufferError, ValueError):  # not contiguous, or read-only; nothing was signed
            return False
        except BaseException as exc:
            self._on_error(exc)
            raise
        finally:
            polling.release()
