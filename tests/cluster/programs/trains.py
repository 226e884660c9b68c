"""Adds up steps, and goes on with those that are left."""

import sys
import time
from pathlib import Path

import numpy as np

import ringreduce as rr
from ringreduce import runtime
from ringreduce.errors import CollectiveError

rr.init()
own = runtime.current("this test")
steps, last, total = 0, 1000, np.zeros(1 << 14)
while steps < last:
    try:
        done = rr.allreduce(np.full(total.shape, steps + 1.0), name="step")
    except CollectiveError:
        if not own.reform(steps):
            steps = rr.broadcast_object(steps, root_rank=own.root)
            rr.broadcast_(total, own.root, name="state")
        last = steps + 5
        continue
    steps, total = steps + 1, total + done
    if rr.rank() == 0 and steps == 3:
        Path("trains").touch()
    time.sleep(0.05)
print("ended with", rr.size(), total[0] == steps * (steps + 1) / 2)
sys.stdout.flush()
