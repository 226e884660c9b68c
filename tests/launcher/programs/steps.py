"""Trains until the file `stop` is there: steps of 20 ms, on rank 1 of 100 ms; a summed flag ends all in one step."""

import os
import time

import numpy as np

import ringreduce as rr

rr.init()
is_over, step = 0.0, 0
while not is_over:
    time.sleep(0.02 + 0.08 * (rr.rank() == 1))
    is_over = rr.allreduce(np.full(1000, float(os.path.exists("stop"))), name="gradient")[0]
    rr.mark_step()
    step += 1
    if step == 3:
        open(f"up{rr.rank()}", "w").close()
