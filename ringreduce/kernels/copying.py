"""Copies between a rank's own memory and memory that ranks share; other cores' caches decide their speed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.kernels.optional import compiled_meanwhile

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

COMPILED_AFTER_BYTES = 16 << 30
"""Sums by NumPy's passes: by then numba's one pass would have saved what its import and compilation take, 1 to 2 s."""

Copy = Callable[[Any, Any], None]
Sum = Callable[[tuple[Any, ...], Any, Any, Any, Any], None]


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
        self._summed_bytes = 0

    write = Faster.copy

    def _other(self) -> Copy | None:
        is_worth = self.uses_other or self._best(False) > SLOW_S
        kernels = compiled_meanwhile("streaming_numba") if is_worth else None
        return None if kernels is None else kernels.copy

    def summing(self, count: int, nbytes: int) -> Sum | None:
        """The kernel for the next sum of `count` arrays of so many bytes that is also written here: `sum_numba.total`.

        None before it is worth its cost and compiled, and where streaming stores are faster.
        """
        self._summed_bytes += nbytes
        if self.uses_other or self._summed_bytes < COMPILED_AFTER_BYTES:
            return None
        kernels = compiled_meanwhile("sum_numba", count)
        return None if kernels is None else kernels.total
