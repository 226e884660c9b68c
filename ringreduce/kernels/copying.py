"""Copies between a rank's own memory and memory that ranks share; other cores' caches decide their speed."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.kernels.optional import imported

ZERO = np.uint8(0)
VECTOR_BYTES = 4096  # from this size on a copy from another core's cache is worth a ufunc's 1 µs
MEASURED_BYTES = 64 << 10  # only copies at least this long are measured
SAMPLES = 5
SLOW_S = 1 / 6e9  # seconds per byte above which plain stores are slow, and numba's import is worth the second it takes
GAIN = 1.5
"""Speedup that streaming stores must have: the others then read from main memory, not from a cache."""
READ_GAIN = 1.05  # speedup that the other kind of reading must have
PROBE_EVERY = 64
"""Copies between trials of the other kind: ranks move from core to core, and virtual cores from chip to chip."""

Copy = Callable[[Any, Any], None]


class Faster:
    """Two kinds of copies, the usual and the other; uses that which was faster in the last trials."""

    def __init__(self, usual: Copy, gain: float) -> None:
        self.uses_other = False
        self._usual, self._gain = usual, gain
        # per byte, the last few copies, of the usual (False) and of the other kind (True)
        self._seconds: dict[bool, deque[float]] = {each: deque(maxlen=SAMPLES) for each in (False, True)}
        self._copies = 0

    def _other(self) -> Copy | None:
        """The other kind; None where it is not worth a trial."""
        raise NotImplementedError

    def copy(self, source: Any, target: Any) -> None:
        """Copy 1-D contiguous elements of one type."""
        if target.nbytes < MEASURED_BYTES:
            target[...] = source
            return
        self._copies += 1
        probes = self._copies % PROBE_EVERY == 0
        other = self._other() if self.uses_other != probes else None
        begin_s = time.perf_counter()
        (other or self._usual)(source, target)
        seconds = self._seconds[other is not None]
        seconds.append((time.perf_counter() - begin_s) / target.nbytes)
        if probes and self._seconds[True]:
            self.uses_other = self._best(False) > self._gain * self._best(True)

    def _best(self, other: bool) -> float:
        """Not the median: where ranks outnumber cores, many copies are interrupted, and look slow."""
        return min(self._seconds[other])


class Reader(Faster):
    """Reads what another core has just written: by a vector loop, or by memcpy, whichever is faster now.

    NumPy's assignment is memcpy, for which glibc uses `rep movsb` on many processors; from another core's cache that
    reads half as fast as a loop of vector instructions, such as any ufunc, on one (AMD EPYC: 7 and 15 GB/s), and a
    tenth faster on another, since it need not read the target's lines first (Intel Xeon).
    """

    def __init__(self) -> None:
        super().__init__(_by_vectors, READ_GAIN)

    def read(self, source: Any, target: Any) -> None:
        """Copy 1-D contiguous elements of one type that another core may have written."""
        if VECTOR_BYTES <= target.nbytes < MEASURED_BYTES and not self.uses_other:
            _by_vectors(source, target)
        else:
            self.copy(source, target)

    def _other(self) -> Copy | None:
        return _by_memcpy


def _by_vectors(source: Any, target: Any) -> None:
    np.bitwise_or(source.view(np.uint8), ZERO, out=target.view(np.uint8))


def _by_memcpy(source: Any, target: Any) -> None:
    target[...] = source


class Writer(Faster):
    """Writes into memory that other cores have read: by plain or by streaming stores, whichever is faster now.

    Before a line that another core has read can be written, that core must give it up. Within one cache that is fast;
    between two chips of a processor, or two sockets, plain stores wait for it line by line, and streaming stores do not
    (AMD EPYC: plain 16 GB/s within a chip and 2.6 between two, streaming 11 and 13). Streaming stores need numba.
    """

    def __init__(self) -> None:
        super().__init__(_by_memcpy, GAIN)

    write = Faster.copy

    def _other(self) -> Copy | None:
        is_worth = self.uses_other or self._best(False) > SLOW_S
        return _compiled_copy() if is_worth else None


def _compiled_copy() -> Copy | None:
    """The kernel; None while a thread imports numba and compiles it: the other ranks would wait for seconds."""
    return None if _compiling().is_alive() else _streaming_copy()


@functools.cache
def _compiling() -> threading.Thread:
    """No daemon: LLVM must be done before the process unloads it."""
    thread = threading.Thread(target=_streaming_copy, name="ringreduce compiles")
    thread.start()
    return thread


@functools.lru_cache(maxsize=1)
def _streaming_copy() -> Copy | None:
    """The kernel, compiled; None where numba is not installed, or does not work."""
    kernels = imported("streaming_numba")
    if kernels is None:
        return None
    try:
        for shift in range(2):  # the source may be unaligned
            memory = np.zeros(32, np.uint8)
            kernels.copy(memory[shift : shift + 8], memory[16:24])
    except Exception:  # a numba that does not fit this NumPy
        return None
    copy: Copy = kernels.copy
    return copy
