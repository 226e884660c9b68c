"""How a thread waits for what other ranks do: it gives the core away for a moment, and then sleeps between looks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

YIELD_S = 200e-6
"""For so long a wait only gives the core away between tests: a small message takes no longer."""
SLEEP_S = 50e-6
"""Then it sleeps between tests. MPI makes progress only inside its functions, and takes a piece of a long message at a
time: with 2 ms instead, a wire of 1 Gbit/s carried 0.96 of what it can, and 0.99 with this."""
LONG_SLEEP_S = 2e-3
PATIENT_AFTER_S = 1.0
"""A peer that is a second late may be minutes late."""


def until(done: Callable[[], bool]) -> None:
    """Return when `done()` is true; ranks may outnumber cores, and a peer may be seconds late."""
    started_s = time.monotonic()
    while not done():
        waited_s = time.monotonic() - started_s
        if waited_s < YIELD_S:
            os.sched_yield()
        else:
            time.sleep(SLEEP_S if waited_s < PATIENT_AFTER_S else LONG_SLEEP_S)
