"""Copies between a rank's own memory and memory that ranks share: other cores' caches decide how fast they are."""

from __future__ import annotations

import functools
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.kernels.optional import with_numba

VECTOR_BYTES = 4096
"""From here on a copy out of another core's cache is worth a ufunc's 1 µs."""
ZERO = np.uint8(0)
MEASURED_BYTES = 64 << 10
"""Writes from here on are measured: shorter ones tell little."""
SAMPLES = 5
SLOW_S = 1 / 6e9
"""A byte takes longer: plain stores are worth replacing, and numba's import the second that it takes."""
GAIN = 1.5
"""Streaming stores must be so much faster: the others read what they wrote out of main memory, not out of a cache."""
PROBE_EVERY = 64
"""Every so many writes the other way is tried: ranks move from core to core, and virtual cores from chip to chip."""

Copy = Callable[[Any, Any], None]


def read(source: Any, target: Any) -> None:
    """Copy what another core has just written; 1-D and contiguous, of one type.

    NumPy's assignment is memcpy, which glibc does by `rep movsb` on many processors; out of another core's cache that
    reads half as fast as a loop of vector instructions, such as any ufunc is (AMD EPYC: 7 and 15 GB/s).
    """
    if source.nbytes < VECTOR_BYTES:
        target[...] = source
    else:
        np.bitwise_or(source.view(np.uint8), ZERO, out=target.view(np.uint8))


class Writer:
    """Writes into memory that other cores have read: by plain or by streaming stores, whichever is faster now.

    Before a line that another core has read can be written, that core must give it up. Within one cache that is quick;
    between two chips of a processor, or two sockets, plain stores wait for it line by line, and streaming stores do not
    (AMD EPYC: plain 16 GB/s within a chip and 2.6 between two, streaming 11 and 13). Streaming stores need numba.
    """

    def __init__(self) -> None:
        self.streams = False
        self._seconds: dict[bool, deque[float]] = {each: deque(maxlen=SAMPLES) for each in (False, True)}
        """Of a byte, the last few, by plain and by streaming stores."""
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
        if probes:
            self._choose()

    def _may_stream(self) -> bool:
        """True when the other way may be worth a try."""
        return self.streams or (statistics.median(self._seconds[False]) > SLOW_S and _streaming_copy() is not None)

    def _choose(self) -> None:
        plain, streaming = self._seconds[False], self._seconds[True]
        if streaming:
            self.streams = statistics.median(plain) > GAIN * statistics.median(streaming)


@functools.lru_cache(maxsize=1)
def _streaming_copy() -> Any:
    """The kernel, compiled; None where numba is not installed, or does not work."""
    kernels = with_numba("streaming_numba")
    if kernels is None:
        return None
    try:
        for shift in range(2):  # the source may lie askew
            memory = np.zeros(32, np.uint8)
            kernels.copy(memory[shift : shift + 8], memory[16:24])
    except Exception:  # a numba that does not fit this NumPy
        return None
    return kernels.copy
