"""How a thread waits for other ranks: it yields the core for a moment, then sleeps between tests."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable


class WaitsFor(enum.IntEnum):
    """What an engine must poll for."""

    NOTHING = 0
    CONTROL = 1  # control messages
    FLAGS = 2  # flags of other ranks in shared memory
    MESSAGES = 3  # long messages, which MPI moves only while it is called


YIELD_S = 2e-3
"""For this long a wait only yields the core between tests. With 0.2 ms ranks that shared cores slept in turn, while
others waited for them: doubling 4 KiB among four hosts on two cores took 1.7 times as long."""
SLEEP_S = 50e-6
"""Then it sleeps between tests. MPI makes progress only inside its functions, on one piece of a long message at a time:
with 2 ms instead, a wire of 1 Gbit/s reached 0.96 of its rate, and 0.99 with this."""
LONG_SLEEP_S = 2e-3
PATIENT_AFTER_S = 1.0  # a peer that is a second late may be minutes late


def until(done: Callable[[], bool]) -> None:
    """Return when `done()` is true; ranks may outnumber cores, and a peer may be seconds late."""
    started_s = time.monotonic()
    while not done():
        waited_s = time.monotonic() - started_s
        if waited_s < YIELD_S:
            os.sched_yield()
        else:
            time.sleep(SLEEP_S if waited_s < PATIENT_AFTER_S else LONG_SLEEP_S)
