"""Rank 1 ends in step 20 as the argument says, while the others wait for it."""

import sys
import time

import numpy as np

import ringreduce as rr
from tests.support.elastic.plain import die

how = sys.argv[1]
rr.init()
for step in range(10**6):
    if step == 20 and rr.rank() == 1:
        print("failing at", time.time(), flush=True)
        if how == "return":
            break
        if how == "MPI_Abort":
            from mpi4py import MPI  # which would start MPI before init()

            MPI.COMM_WORLD.Abort(5)  # under MPICH it returns, and the rank is killed after that
        else:
            die(how)
    rr.allreduce(np.ones(1000) * rr.rank())
