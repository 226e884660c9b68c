"""Copies between a rank's own memory and memory that ranks share; other cores' caches decide their speed."""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.kernels.optional import with_numba

VECTOR_BYTES = 4096  # from this size on a copy from another core's cache is worth a ufunc's 1 µs
ZERO = np.uint8(0)
MEASURED_BYTES = 64 << 10  # only writes at least this long are measured
SAMPLES = 5
SLOW_S = 1 / 6e9  # seconds per byte above which plain stores are slow, and numba's import is worth the second it takes
GAIN = 1.5
"""Speedup that streaming stores must have: the others then read from main memory, not from a cache."""
PROBE_EVERY = 64
"""Writes between trials of the other kind: ranks move from core to core, and virtual cores from chip to chip."""

Copy = Callable[[Any, Any], None]


def read(source: Any, target: Any) -> None:
    """Copy what another core has just written; 1-D and contiguous, of one type.

    NumPy's assignment is memcpy, for which glibc uses `rep movsb` on many processors; from another core's cache that
    reads half as fast as a loop of vector instructions, such as any ufunc (AMD EPYC: 7 and 15 GB/s).
    """
    if source.nbytes < VECTOR_BYTES:
        target[...] = source
    else:
        np.bitwise_or(source.view(np.uint8), ZERO, out=target.view(np.uint8))


class Writer:
    """Writes into memory that other cores have read: by plain or by streaming stores, whichever is faster now.

    Before a line that another core has read can be written, that core must give it up. Within one cache that is fast;
    between two chips of a processor, or two sockets, plain stores wait for it line by line, and streaming stores do not
    (AMD EPYC: plain 16 GB/s within a chip and 2.6 between two, streaming 11 and 13). Streaming stores need numba.
    """

    def __init__(self) -> None:
        self.streams = False
        # per byte, the last few writes, with plain (False) and with streaming stores (True)
        self._seconds: dict[bool, deque[float]] = {each: deque(maxlen=SAMPLES) for each in (False, True)}
        self._writes = 0

    def write(self, source: Any, target: Any) -> None:
        """Copy 1-D contiguous elements of one type into memory that other cores may have read."""
        if target.nbytes < MEASURED_BYTES:
            target[...] = source
            return
        self._writes += 1
        probes = self._writes % PROBE_EVERY == 0
        streams = self.streams != (probes and self._may_stream())
        begin_s = time.perf_counter()
        if streams:
            _streaming_copy()(source.view(np.uint8), target.view(np.uint8))
        else:
            target[...] = source
        samples = self._seconds[streams]
        samples.append((time.perf_counter() - begin_s) / target.nbytes)
        if probes and self._seconds[True]:
            self.streams = statistics.median(self._seconds[False]) > GAIN * statistics.median(self._seconds[True])

    def _may_stream(self) -> bool:
        """True when the other kind may be worth a trial."""
        return self.streams or (statistics.median(self._seconds[False]) > SLOW_S and _streaming_copy() is not None)


@functools.lru_cache(maxsize=1)
def _streaming_copy() -> Any:
    """The kernel, compiled; None where numba is not installed, or does not work."""
    kernels = with_numba("streaming_numba")
    if kernels is None:
        return None
    try:
        for shift in range(2):  # the source may be unaligned
            memory = np.zeros(32, np.uint8)
            kernels.copy(memory[shift : shift + 8], memory[16:24])
    except Exception:  # a numba that does not fit this NumPy
        return None
    return kernels.copy
