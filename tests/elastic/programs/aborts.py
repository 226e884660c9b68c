"""Rank 1 calls MPI_Abort."""

import os
import time

import daemons
from mpi4py import MPI

import ringreduce as rr

daemon = daemons.own()
rr.init()
state = rr.elastic.ObjectState(step=0)


@rr.elastic.run
def train(state):
    if rr.rank() == 1 and rr.size() == 3:
        MPI.COMM_WORLD.Abort(5)
        time.sleep(1000)
    # under MPICH the rank may be killed before the daemon has heard from it
    awaits_end = not MPI.Get_library_version().startswith("MPICH") and os.path.exists(f"/proc/{daemon}")
    while rr.allreduce(float(rr.size() == 2 and not awaits_end)) < 1:
        awaits_end = awaits_end and os.path.exists(f"/proc/{daemon}")
        time.sleep(0.05)


train(state)
time.sleep(0.5)
print("ended with", rr.size())
