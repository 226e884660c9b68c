"""Trains until the file `stop` is in the folder: steps of 20 ms, on one rank of 100 ms. Arguments: folder, rank."""

import sys
import time
from pathlib import Path

import numpy as np

import ringreduce as rr

rr.init()
folder, late, is_over = Path(sys.argv[1]), int(sys.argv[2]), 0.0
while not is_over:
    time.sleep(0.02 + 0.08 * (rr.rank() == late))
    is_over = rr.allreduce(np.full(1000, float((folder / "stop").exists())), name="gradient")[0]
    rr.mark_step()
    (folder / "trains").touch()
