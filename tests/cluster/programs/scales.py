"""A few megabytes reduced in each step, after some time that takes no core; until it is ended."""

import time

import numpy as np

import ringreduce as rr

rr.init()
gradient = np.ones(500_000, np.float32)
while True:
    time.sleep(0.02)
    rr.allreduce_(gradient, name="gradient", op=rr.Max)
    rr.mark_step(examples=32)
