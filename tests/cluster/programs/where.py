"""Prints where a rank is, the sum of what all have, and the variables that are named."""

import os
import socket
import sys

import numpy as np

import ringreduce as rr

rr.init()
total = rr.allreduce(np.arange(100_000.0) * (rr.rank() + 1), name="w", op=rr.Sum)[999]
at = rr.local_rank(), rr.local_size(), rr.cross_rank(), rr.cross_size(), rr.size()
print(rr.rank(), socket.gethostname(), *at, total, *map(os.environ.get, sys.argv[1:]))
