"""Rank 1 comes 3 s late to the second allreduce."""

import time

import numpy as np

import ringreduce as rr

rr.init()
rr.allreduce(np.ones(3), name="first")
if rr.rank() == 1:
    time.sleep(3)
rr.allreduce(np.ones(3), name="late")
print("done")
