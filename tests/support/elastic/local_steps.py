"""Training by DiLoCo in program.py's jobs: two fragments, applied with a delay, and a commit every six steps."""

import numpy as np

import ringreduce as rr
from tests.support.local_steps import RATE, Simulated

BETWEEN_COMMITS = 6
LR, MOMENTUM = 0.7, 0.5


def start(count):
    return {"a": np.zeros(count // 2), "b": np.zeros(count - count // 2)}


def gradient(half, name, rank, step):
    """Of a rank of the job's start: its data differ by rank, step, name and index."""
    return (half - np.sin(np.arange(len(half)) * (rank + 1) + step + ord(name))) * (1 + rank)


class Descent:
    """Changes its arrays in place."""

    def __init__(self, parameters):
        self.parameters = parameters

    def step(self, grads):
        for name, each in self.parameters.items():
            each -= RATE * grads[name]


def new_state(kind, count):
    """kind: an ObjectState, perhaps of a subclass."""
    halves = start(count)
    outer = rr.Nesterov(LR, MOMENTUM)
    options = {"sync_every": BETWEEN_COMMITS, "fragments": 2, "delay": 2, "outer": outer}
    return kind(optimizer=rr.DiLoCo(Descent(halves), halves, **options), halves=halves, history=[], step=0)


def train(state, steps, rank, deaths, who_is_there):
    """Train until so many steps are done; returns the anchors."""
    begins = True
    while state.step < steps:
        block = range(state.step, state.step + BETWEEN_COMMITS)
        for step in block:
            deaths.at("step", step)
            state.optimizer.step({name: gradient(each, name, rank, step + 1) for name, each in state.halves.items()})
            deaths.at("submitted", step)
        who = who_is_there().tolist()
        for step in block:
            deaths.at("between", step)
        state.history += [[who, begins] for _ in block]
        state.step += BETWEEN_COMMITS
        state.commit()
        begins = False
    state.optimizer.begin_from_anchors()
    return np.concatenate([state.halves["a"], state.halves["b"]])


def replay(history, count):
    """The anchors, by one process; True in the history: the steps since a commit began with all ranks at them."""
    options = {"sync_every": BETWEEN_COMMITS, "delay": 2, "lr": LR, "momentum": MOMENTUM}
    one = Simulated([], start(count), gradient, ["a", "b"], **options)
    for step, (ranks, begins) in enumerate(history):
        if begins and step % BETWEEN_COMMITS == 0:
            one.begin(ranks)
        one.step()
    return np.concatenate([one.anchors["a"], one.anchors["b"]])
