"""What the ranks of a job run: training on GPU arrays, of the stand-in for CuPy, in which a rank dies.

    python -m tests.support.elastic.gpu_training 'RANK STEP WHERE'…

WHERE: `submitted`, before the collectives are waited for, `queued`, when the GPU has work that others wait for and that
it has not done, or `between` two steps. Each rank that is left prints how many ranks there are, whether the parameters
are those that one process computes, how they were reduced, and what it holds on the GPU: blocks of its own, of others,
and events that others may open.
"""

import os
import signal
import sys

import cupy
import numpy as np

import ringreduce as rr
from ringreduce.gpu.ipc import Slots
from tests.support import fake_cupy

STEPS, COUNT, RATE = 12, 30_000, 0.125
rank = int(os.environ["RANK"])


def gradient(of, step):
    """Of a rank of the start: sums of these are exact."""
    return ((np.arange(COUNT) * 7 + of * 3 + step) % 11).astype(np.float32)


def die(step, where):
    if f"{rank} {step} {where}" in sys.argv[1:]:
        os.kill(os.getpid(), signal.SIGKILL)


def replay(history):
    parameters = np.zeros(COUNT, np.float32)
    for step, ranks in enumerate(history):
        parameters -= np.float32(RATE) * sum(gradient(each, step) for each in ranks)
    return parameters


def main():
    def publish(*args):
        publish_as_ever(*args)
        die(state.step, "queued")

    publish_as_ever, Slots.publish = Slots.publish, publish
    rr.init()
    state = rr.elastic.ObjectState(parameters=cupy.zeros(COUNT, np.float32), history=[], step=0)

    @rr.elastic.run
    def train(state):
        while state.step < STEPS:
            die(state.step, "between")
            mine = cupy.array(gradient(rank, state.step))
            who = np.zeros(int(os.environ["WORLD_SIZE"]))
            who[rank] = 1
            parts = {"short": mine[:5], "long": mine[5:]}
            handles = [rr.allreduce_async_(part, op=rr.Sum, name=name) for name, part in parts.items()]
            die(state.step, "submitted")
            who = rr.allreduce(who, op=rr.Sum, name="who")
            for handle in handles:
                rr.synchronize(handle)
            state.parameters -= cupy.array(np.full(COUNT, RATE, np.float32)) * mine
            state.history.append(np.flatnonzero(who).tolist())
            state.step += 1
            state.commit()

    train(state)
    is_right = np.array_equal(state.parameters.get(), replay(state.history))
    path = rr.info().gpu_algorithm.partition(":")[0]
    with fake_cupy.machine.entered():
        blocks = [each.is_foreign for each in fake_cupy.machine.memory.in_use() if each.kind == "device"]
        held = blocks.count(False), blocks.count(True), len(fake_cupy.machine.exported)
    print(rr.size(), is_right, path, *held)


if __name__ == "__main__":
    main()
