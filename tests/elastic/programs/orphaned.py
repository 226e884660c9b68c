"""Rank 0 kills the MPI's daemon that has started the ranks."""

import os
import signal
import time

import daemons
import numpy as np

import ringreduce as rr

rr.init()
daemon = daemons.own()
rr.barrier()
if rr.rank() == 0:
    os.kill(daemon, signal.SIGKILL)
for step in range(50):
    assert rr.allreduce(np.full(3, rr.rank() + step), op=rr.Sum, name="step")[0] == 3 + 3 * step
    time.sleep(0.02)
print("ended with", rr.size())
