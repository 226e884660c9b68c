"""Rank 1 has done its training before the others, and calls shutdown()."""

import numpy as np

import ringreduce as rr

rr.init()
steps = 2 if rr.rank() == 1 else 4
state = rr.elastic.ObjectState(step=0)


@rr.elastic.run
def train(state):
    while state.step < steps:
        rr.allreduce(np.ones(3), name="w")
        state.step += 1
        state.commit()


train(state)
size = rr.size()
rr.shutdown()
print(f"ended with {state.step} steps of {size}")
