"""Goes on from its checkpoint; rank 1 dies in step 3 of the first attempt."""

import os
import signal
from pathlib import Path

import numpy as np

import ringreduce as rr

rr.init()
checkpoint = Path("checkpoint.npy")
total = np.load(checkpoint) if checkpoint.exists() else np.zeros(2)
first = int(total[0])
print("attempt", os.environ["RINGREDUCE_RESTART_COUNT"], "begins at step", first, flush=True)
for step in range(first, 6):
    total += rr.allreduce(np.array([1.0, step * (rr.rank() + 1)]), op=rr.Sum) / [rr.size(), 1]
    if rr.rank() == 0:
        np.save("new.npy", total)
        os.replace("new.npy", checkpoint)
    rr.barrier()
    if step == 3 and rr.rank() == 1 and os.environ["RINGREDUCE_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
print("done", *total)
