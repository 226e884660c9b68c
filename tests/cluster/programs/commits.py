"""Rank 1 dies after a commit that each host keeps."""

import os
import signal

import numpy as np

import ringreduce as rr

rr.init()
state = rr.elastic.ObjectState(step=0)


@rr.elastic.run
def train(state):
    while state.step < 4:
        rr.allreduce(np.ones(3))
        state.step += 1
        state.commit()
        if state.step == 2 and rr.size() == 2 and rr.rank() == 1:
            assert os.listdir(os.environ["RINGREDUCE_STATE_DIR"])
            os.kill(os.getpid(), signal.SIGKILL)


train(state)
print("ended with", rr.size(), flush=True)
