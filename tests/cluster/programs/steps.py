"""Trains for a minute. In step 20 rank 0 makes a file, and rank 2 pauses, then goes on or ends: SECONDS HOW."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import ringreduce as rr

rr.init()
for step in range(3000):
    rr.allreduce(np.ones(1000) * rr.rank(), name="layer3.w")
    if step == 20 and rr.rank() == 0:
        Path("training").touch()
    if step == 20 and rr.rank() == 2:
        time.sleep(float(sys.argv[1]))
        if sys.argv[2] == "raise":
            raise ValueError("boom")
        if sys.argv[2] == "exit":
            sys.exit(7)
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
