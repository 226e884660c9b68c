"""Copies from another process's memory on this host into one's own, in one go: Linux's process_vm_readv.

A place is a row (address, bytes) of a 2-D int64 array, which is the kernel's iovec.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

MOST_PLACES = 1024  # of a call: IOV_MAX
MOST_BYTES = 1 << 30  # of a call, and of a place: the kernel copies less than 2 GiB


def places(arrays: Sequence[Any]) -> Any:
    """Where contiguous arrays are; empty ones are nowhere."""
    found = [
        (each.ctypes.data + low, min(each.nbytes - low, MOST_BYTES))
        for each in arrays
        for low in range(0, each.nbytes, MOST_BYTES)
    ]
    return np.array(found, np.int64).reshape(len(found), 2)


def read(process: int, theirs: Any, own: Any) -> bool:
    """Copy what is at places of a process to places of one's own, which are as long, one by one.

    Returns: False where it could not: the process is another user's or has ended, is in another container, the kernel
             forbids it or has no such call, or the memory is a device's.
    """
    call, first = _call(), 0
    while first < len(own):
        totals = np.cumsum(own[first : first + MOST_PLACES, 1])
        count = int(np.searchsorted(totals, MOST_BYTES, "right"))
        into, of = own[first : first + count], theirs[first : first + count]
        if call is None or call(process, into.ctypes.data, count, of.ctypes.data, count, 0) != totals[count - 1]:
            return False
        first += count
    return True


@functools.cache
def _call() -> Any:
    found = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if found is not None:
        pointer, count = ctypes.c_void_p, ctypes.c_ulong
        found.argtypes, found.restype = (ctypes.c_int, pointer, count, pointer, count, count), ctypes.c_ssize_t
    return found
