"""Linux's futex: sleep until another process, which shares the memory, has written a word and wakes those who wait."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import Any

_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1
_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
EXISTS = _NUMBER != 0 and sys.byteorder == "little"


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


def wait(address: int, value: int, limit_s: float) -> None:
    """Sleep while the int64 there is this value; may return early."""
    limit = ctypes.byref(_Timespec(int(limit_s), int(limit_s % 1 * 1e9)))
    _call(address, _WAIT, value & 0xFFFFFFFF, limit)


def wake(address: int) -> None:
    """Wake all who wait at this address, in any process."""
    _call(address, _WAKE, _ALL, None)


def _call(address: int, operation: int, value: int, limit: Any) -> None:
    """Its low half, which is first, is the kernel's word."""
    _libc().syscall(_NUMBER, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), limit, None, 0)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None)
