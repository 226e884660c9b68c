"""Rank 0 kills the MPI's daemon that has started the ranks."""

import os
import signal
import time

import numpy as np

import ringreduce as rr


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


rr.init()
daemon = parent(parent(os.getppid()))  # of the MPI; it has started the parent, the anchor, of this rank's agent
rr.barrier()
if rr.rank() == 0:
    os.kill(daemon, signal.SIGKILL)
for step in range(50):
    assert rr.allreduce(np.full(3, rr.rank() + step), op=rr.Sum, name="step")[0] == 3 + 3 * step
    time.sleep(0.02)
print("ended with", rr.size())
