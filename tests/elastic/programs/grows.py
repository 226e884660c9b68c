"""Rank 0 adds slots to the hostfile; the job continues with three ranks."""

import os
import sys
import time

import numpy as np

import ringreduce as rr

rr.init()
state = rr.elastic.ObjectState(step=0, sizes=[], attempts=[])


@rr.elastic.run
def train(state):
    while state.sizes.count(3) < 10:
        rr.allreduce(np.ones(3), name="gradient")
        state.sizes.append(rr.size())
        state.attempts.append(int(os.environ["RINGREDUCE_RESTART_COUNT"]))
        state.step += 1
        state.commit()
        if state.step == 10 and rr.rank() == 0:
            with open(sys.argv[1], "w") as file:
                file.write("localhost slots=4")
        time.sleep(0.02)


train(state)
assert state.attempts == sorted(state.attempts)
assert set(state.attempts) == {0, 1}
assert [size == 3 for size in state.sizes] == [attempt == 1 for attempt in state.attempts]
print("of", rr.size(), "all steps", len(state.sizes) == state.step >= 20)
