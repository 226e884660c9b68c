"""Short operations of a channel in the caller's thread: each one call of the compiled module, instead of a submission.

What an operation needs is learned when one like it has gone the usual way. All ranks sign it as usual, so one that
takes the lane may work with one that submits. Where others are late, or have called something else, this rank submits
what it has signed: so errors, stalls and losses are those of submissions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ringreduce.collectives.compiled import PATIENCE_US
from ringreduce.execution.channel import Channel, hash_of
from ringreduce.execution.in_slot import Gets, in_slot
from ringreduce.transport.window import Region, Signatures

MOST_KNOWN = 1024
TAKE_OVER_S = 1e-3  # how long it waits for a look of the engine's thread to end; that may be moving much data


class Known(NamedTuple):
    """Operations that were learned."""

    run: Callable[..., int]  # of the compiled module
    signatures: Signatures
    region: Region
    slots: int  # that it uses
    shape: tuple[int, ...]  # of its result


class Lane:
    """One channel's, on one rank.

    polling:  the lock of the thread that may run operations; on_error: called with what has interrupted one.
    """

    def __init__(self, channel: Channel, polling: threading.Lock, on_error: Callable[[BaseException], object]) -> None:
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
        """Operations of this key are as this one, which is over."""
        signatures = self._channel.signatures
        if signatures is None or len(self._known) >= MOST_KNOWN:
            return
        fits = in_slot(submission, self._channel.executor.context)
        exchange = None if fits is None else fits.compiled(signatures, hash_of(submission.signature))
        if fits is not None and exchange is not None:
            shape = submission.outputs[0].shape if submission.outputs else ()
            self._known[key] = Known(exchange.run, signatures, fits.region, fits.gets is not Gets.NOTHING, shape)

    def run(self, known: Known, source: Any, target: Any) -> bool:
        """Run it; True when it is done; else it must be submitted."""
        polling, channel = self._polling, self._channel
        if not (polling.acquire(False) or polling.acquire(timeout=TAKE_OVER_S)):
            return False
        try:
            if self._executor.busy or channel.closed or channel.signed is not None or self._timeline.recording:
                return False
            run, signatures, region, slots, _ = known
            number = signatures.sequence
            state = run(source, target, number, region.sequence, PATIENCE_US)
            signatures.sequence = number + 1
            if state:
                channel.signed = number
                return False
            region.sequence += slots
            return True
        except (BufferError, ValueError):  # not contiguous, or read-only; nothing was signed
            return False
        except BaseException as exc:
            self._on_error(exc)
            raise
        finally:
            polling.release()
