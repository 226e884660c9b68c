"""A short all-reduce by recursive doubling that also finds out whether all ranks mean the same one.

Each message begins with a hash, 0 once two have differed, and each is received into room for the longest: ranks that
mean different ones differ in length, too.

    | hash | elements |

An operation that is not short sends no elements, and learns only whether all ranks mean it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.collectives import doubling
from ringreduce.collectives.cost_model import SHORT_BYTES
from ringreduce.transport.base import Steps, Transport

HASH_BYTES = 8


def allreduce(
    number: int | None, partial: Any, transport: Transport, combine: Callable[[Any, Any], object]
) -> Steps[Any | None]:
    """Combine `partial` over all ranks; None on all of them when they do not all pass the same number.

    number:  a hash, of 64 bits; None: of this rank's host, for which it speaks, ranks mean different ones.
    partial: (count,), contiguous, NumPy, of at most SHORT_BYTES; not changed.
    Cost:    as `doubling`, with 8 bytes more a message.
    """
    length = HASH_BYTES + partial.nbytes
    message, room = (np.zeros(HASH_BYTES + SHORT_BYTES, np.uint8) for _ in range(2))
    message[:HASH_BYTES].view(np.int64)[0] = 0 if number is None else number or 1
    message[HASH_BYTES:length].view(partial.dtype)[:] = partial

    def merge(target: Any, source: Any) -> None:
        ours, theirs = target[:HASH_BYTES].view(np.int64), source[:HASH_BYTES].view(np.int64)
        if ours[0] != theirs[0]:
            ours[0] = 0
        elif partial.nbytes:
            combine(*(each[HASH_BYTES:length].view(partial.dtype) for each in (target, source)))

    result = yield from doubling.combined(message, room, transport, merge, length)
    return result[HASH_BYTES:length].view(partial.dtype) if result[:HASH_BYTES].any() else None
