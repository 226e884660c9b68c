"""Short operations of a channel in the caller's thread: each is one call of the compiled module, not a submission.

All ranks sign an operation as usual, so one that takes the lane may work with one that submits. Where others are late,
or have called something else, this rank submits what it has signed: so errors, stalls and losses are those of
submissions.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from ringreduce.arrays.buffer import numpy_buffer
from ringreduce.collectives.compiled import PATIENCE_US
from ringreduce.execution.channel import Channel
from ringreduce.execution.program import Program, Programs, program_of
from ringreduce.execution.steps import StepRecorder

TAKE_OVER_S = 1e-3  # how long it waits for a look of the engine's thread to end; that may be moving much data


class Lane:
    """The lane of one channel, on one rank.

    polling:  the lock of the thread that may run operations; on_error: called with what has interrupted one.
    is_unsafe: see inbox.may_be_interrupted.
    submitting: while it has `inspectors`, or counts what is `owed`, nothing is run here.
    ending: nor when it has an `error`.
    """

    def __init__(
        self,
        channel: Channel,
        polling: threading.Lock,
        on_error: Callable[[BaseException], object],
        is_unsafe: Callable[[], bool],
        recorder: StepRecorder,
        submitting: Any,
        ending: Any,
    ) -> None:
        self._polling, self._on_error, self._is_unsafe = polling, on_error, is_unsafe
        self._channel, self._queue, self._timeline = channel, channel.executor.queue, channel.executor.context.timeline
        self._recorder, self._submitting, self._ending = recorder, submitting, ending
        self.programs = Programs(functools.partial(program_of, context=channel.executor.context, channel=channel))

    def run(self, program: Program, source: Any, target: Any) -> bool:
        """Run an operation; True when it is done, else it must be submitted."""
        polling, channel, submitting = self._polling, self._channel, self._submitting
        since_s = time.monotonic() if self._recorder.recording else None
        if not (polling.acquire(False) or polling.acquire(timeout=TAKE_OVER_S)):
            return False
        try:
            if self._queue or channel.signed is not None or channel.crossing is not None or channel.closed:
                return False
            if self._timeline.recording or self._ending.error or submitting.inspectors or submitting.owed > 0:
                return False
            if program.in_python and self._is_unsafe():
                return False
            region = program.region
            signatures = None if region is None else channel.signatures
            number, sequence = (0, 0) if signatures is None else (signatures.sequence, region.sequence)
            try:
                begin = program.pieces(source, target) if program.in_pieces else None
                done = program.run(source, target, number, sequence, PATIENCE_US) == 0
            except (BufferError, ValueError):  # not contiguous, or read-only; nothing was signed
                return False
            if signatures is not None:
                signatures.sequence = number + 1
                if done and begin is not None and not (rest := begin()).ended_soon():
                    channel.rest, done = (rest, numpy_buffer(target, True).flat), False
                if done:
                    region.sequence += program.slots
                else:
                    channel.signed = number
            if since_s is not None:
                self._recorder.passed(*program.recorded, since_s, program.algorithm if done else None)
            channel.begun += done
            return done
        except BaseException as exc:
            self._on_error(exc)
            raise
        finally:
            polling.release()
