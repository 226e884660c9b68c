"""Ranks with different numbers of batches join(); rank 1 dies."""

import os
import signal
import sys

import numpy as np

import ringreduce as rr

rr.init()
rank, sums = int(os.environ["RANK"]), {}  # of each rank, so no part of the state


@rr.elastic.run
def train(state):
    while state.step < 6:  # rank 0 has one batch less than the others, and joins while they use their last one
        if rank == 1 and state.step == 3 and rr.size() == 4:
            if sys.argv[1] == "joined":
                rr.join()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank:
            sums[state.step] = float(rr.allreduce(np.ones(1), op=rr.Sum, name="batch")[0])
        last = rr.join()
        state.step += 1
        state.commit()
    print("last", last > 0, "sums", list(sums.values()))


train(rr.elastic.ObjectState(step=0))
