"""How a thread waits for what other ranks do: it gives the core away, and after a while sleeps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

YIELD_S = 10e-3
"""For so long a wait only gives the core away between tests; after that it sleeps, first 50 µs, then longer.

A rank that sleeps does not move its own sends on: MPI makes progress only inside its functions. With 1 ms, and twice as
many ranks as cores, the ring of 32 MiB took five times longer over MPICH.
"""
FIRST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 2e-3


def until(done: Callable[[], bool]) -> None:
    """Return when `done()` is true. Ranks may outnumber cores, a peer may be seconds late: nobody spins for long."""
    yield_until_s = time.monotonic() + YIELD_S
    sleep_s = FIRST_SLEEP_S
    while not done():
        if time.monotonic() < yield_until_s:
            os.sched_yield()
        else:
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)
