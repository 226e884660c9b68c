"""What it costs to be a rank: with nothing to do, and waiting for a peer that is late.

    ringrun -np 2 python bench/waiting.py

Prints the processor time that rank 0 used, all its threads together, in percent of one core: idle after init(), then
with an all-reduce under way for which rank 1 is late, first waiting for it, then doing nothing about it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

import ringreduce as rr

SECONDS = 10.0


def percent_of_a_core(action: Callable[[], object]) -> float:
    """Processor time of this process over the time that `action` takes."""
    wall, used = time.perf_counter(), time.process_time()
    action()
    return 100 * (time.process_time() - used) / (time.perf_counter() - wall)


def main() -> None:
    """Idle, then wait."""
    rr.init()
    if rr.size() < 2:
        sys.exit("bench/waiting.py: one rank waits for nobody; start it with: ringrun -np 2 python bench/waiting.py")
    rr.barrier()
    idle = percent_of_a_core(lambda: time.sleep(SECONDS))
    rr.barrier()
    if rr.rank() == 1:
        time.sleep(SECONDS)
    waiting = percent_of_a_core(lambda: rr.allreduce(np.ones(10)))
    rr.barrier()
    if rr.rank() == 1:
        time.sleep(SECONDS)
    handle = rr.allreduce_async(np.ones(10))
    pending = percent_of_a_core(lambda: time.sleep(SECONDS))
    rr.synchronize(handle)
    if rr.rank() == 0:
        print(f"idle for {SECONDS:.0f} s: {idle:.4f} % of a core")
        print(f"waiting for a rank that is {SECONDS:.0f} s late: {waiting:.2f} % of a core")
        print(f"the same, pending: {pending:.2f} % of a core")


if __name__ == "__main__":
    main()
