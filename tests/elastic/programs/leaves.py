"""Rank 1 dies while the others are in shutdown()."""

import os
import signal
import time

import ringreduce as rr

rr.init()
if rr.rank() == 1:
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
rr.shutdown()
print("went on")
