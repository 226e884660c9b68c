"""Short operations of a channel in the caller's thread: each one call of the compiled module, instead of a submission.

What an operation needs is learned when one like it has gone the usual way. All ranks sign it as usual, so one that
takes the lane may work with one that submits. Where others are late, or have called something else, this rank submits
what it has signed: so errors, stalls and losses are those of submissions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from ringreduce.collectives import compiled
from ringreduce.execution import operations
from ringreduce.execution.allreduce import is_short
from ringreduce.execution.channel import Channel, hash_of
from ringreduce.execution.context import reduction_of

REDUCED, OF_ONE, NOTHING = range(3)  # as in kernels/native.c
NO_NUMBERS = 0, 0, 1.0, 1.0, 1.0
MOST_KNOWN = 1024


class Lane:
    """One channel's, on one rank.

    polling:  the lock of the thread that may run operations; on_error: called with what has interrupted one.
    """

    def __init__(self, channel: Channel, polling: threading.Lock, on_error: Callable[[BaseException], object]) -> None:
        self._channel, self._polling, self._on_error = channel, polling, on_error
        self._known: dict[Hashable, tuple[Any, ...]] = {}
        """The region, the signatures, the operation's hash, and what the compiled module does."""

    def learn(self, key: Hashable, submission: Any) -> None:
        """Operations of this key are as this one, which is over."""
        context, signatures = self._channel.executor.context, self._channel.signatures
        region, (kind, _, _, details, _) = context.algorithms.shared_region, submission.signature
        if region is None or not region.can_be_compiled or signatures is None or len(self._known) >= MOST_KNOWN:
            return
        how: tuple[Any, ...] | None = None
        if kind == "barrier":
            how = NOTHING, *NO_NUMBERS, 0
        elif is_short(submission, region) and kind == "broadcast":
            how = OF_ONE, *NO_NUMBERS, self._channel.members.index(submission.signature.detail("root_rank"))
        elif is_short(submission, region) and kind == "allreduce" and operations.ADASUM not in details:
            reduction = reduction_of(submission, submission.inputs[0].element, len(context.members))
            how = None if reduction.compiled is None else (REDUCED, *reduction.compiled, 0)
        if how is not None:
            self._known[key] = region, signatures, hash_of(submission.signature), how

    def run(self, key: Hashable, array: Any) -> bool:
        """Run it in place; True when it is done; else it must be submitted."""
        channel = self._channel
        try:
            found = self._known.get(key)
        except TypeError:  # an argument that cannot be hashed, nor be right
            return False
        if found is None or not self._polling.acquire(blocking=False):
            return False
        try:
            context = channel.executor.context
            if channel.executor.busy or channel.closed or channel.signed is not None or context.timeline.recording:
                return False
            region, signatures, signature, how = found
            number, sequence, patience_us = signatures.sequence, region.sequence, compiled.PATIENCE_US
            state = region.compiled.exchange(signatures.compiled, number, signature, sequence, how, array, patience_us)
            signatures.sequence = number + 1
            if state:
                channel.signed = number
                return False
            region.sequence = sequence + (how[0] != NOTHING)
            return True
        except (BufferError, ValueError):  # not contiguous, or read-only; nothing was signed
            return False
        except BaseException as exc:
            self._on_error(exc)
            raise
        finally:
            self._polling.release()
