"""Fingerprints of arrays: 64 bits, so that ranks can compare much by sending little."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

COLUMNS = 512


def fingerprint(data: Any) -> int:
    """That of bytes, (count,) of uint8, contiguous, or of Python's `bytes`: a signed number of 64 bits.

    Added up in columns of 64 bits first, as fast as memory is read, then hashed: any one bit that differs changes it,
    and what does not change it, rows of 4 KiB that have changed places say, is not what goes wrong in a training.
    Cost: the bytes are read once.
    """
    data = np.frombuffer(data, np.uint8)
    whole = data.size // (8 * COLUMNS) * 8 * COLUMNS
    sums = data[:whole].view(np.uint64).reshape(-1, COLUMNS).sum(0, dtype=np.uint64)
    hashed = hashlib.blake2b(sums, digest_size=8)
    hashed.update(data[whole:])
    hashed.update(str(data.size).encode())
    return int.from_bytes(hashed.digest(), "little", signed=True)
