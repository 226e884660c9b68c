"""Process sets and an ordered channel, before and after rank 1 dies."""

import os
import signal

import numpy as np

import ringreduce as rr

together, lost = rr.ProcessSet([0, 2]), rr.ProcessSet([0, 1])
rr.init(process_sets=[together, lost])
state = rr.elastic.ObjectState(step=0)
channels = []


def refused(function):
    try:
        function()
    except ValueError as error:
        return str(error)


@rr.elastic.run
def train(state):
    channels.append(rr.ordered())
    while state.step < 6:
        channels[-1].allreduce(np.ones(3))
        if together.included():
            assert rr.allreduce(np.ones(2), op=rr.Sum, process_set=together)[0] == 2
        state.step += 1
        state.commit()
        if state.step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)


train(state)
print("together", together.included(), together.rank(), together.size())
print("lost", refused(lambda: rr.allreduce(np.ones(2), process_set=lost)))
if len(channels) == 2:
    print("channel", refused(lambda: channels[0].allreduce(np.ones(2))))
