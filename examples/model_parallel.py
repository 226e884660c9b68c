"""A network split over ranks: each stage of a pipeline has some of the layers, and every stage has replicas.

    ringrun -np 2 python examples/model_parallel.py                # two stages, one rank each
    ringrun -np 4 python examples/model_parallel.py                # two stages of two replicas each
    ringrun -np 4 python examples/model_parallel.py --stages 4

A batch goes through the stages in micro-batches: activations forward, their gradients backward, by send and recv. Then
the replicas of each stage average their gradients. The loss is that of one process with the whole network and batch.
"""

import argparse
import itertools

import numpy as np
from sklearn.datasets import load_digits

import ringreduce as rr

WIDTHS = (64, 48, 32, 24, 10)  # of what goes into and out of the four layers
BATCH, MICRO, STEPS, RATE = 64, 4, 400, 0.2

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int, default=2)
options = parser.parse_args()

rr.init(process_sets="dynamic")
rank, size, stages = rr.rank(), rr.size(), min(options.stages, rr.size())
layers = len(WIDTHS) - 1
if size % stages or layers % stages:
    raise SystemExit(f"--stages {stages}: expected a divisor of {size} ranks and of {layers} layers")
replicas = size // stages
stage, replica = divmod(rank, replicas)
teams = [range(each * replicas, (each + 1) * replicas) for each in range(stages)]
team = rr.global_process_set if stages == 1 else [rr.add_process_set(each) for each in teams][stage]
pipeline = rr.ordered()
before, after = rank - replicas, rank + replicas  # this replica's ranks of the neighbouring stages

draw = np.random.default_rng(0)  # all ranks draw the whole network, and each keeps its stage's layers
network = [draw.normal(0, (2 / k) ** 0.5, (k, n)) for k, n in itertools.pairwise(WIDTHS)]
first, last = stage * layers // stages, (stage + 1) * layers // stages
weights = network[first:last]

images, labels = load_digits(return_X_y=True)
images, rows = images / 16, BATCH // replicas // MICRO  # of a micro-batch


def forward(x):
    """What comes out of this stage, and what went into each layer."""
    seen = []
    for number, w in enumerate(weights, first):
        seen.append(x)
        x = x @ w
        if number < layers - 1:
            x = np.maximum(x, 0)
    return x, seen


def backward(delta, out, seen):
    """The gradient of what came in, and those of the weights."""
    gradients = []
    for number in reversed(range(len(weights))):
        if first + number < layers - 1:
            delta = delta * (out > 0)
        gradients.insert(0, seen[number].T @ delta)
        delta, out = delta @ weights[number].T, seen[number]
    return delta, gradients


sampler = np.random.default_rng(1)
for step in range(STEPS):
    batch = sampler.integers(0, 1500, BATCH).reshape(replicas, MICRO, rows)[replica]
    passed, sending, loss = [], [], 0.0
    for micro in batch:  # all forward …
        x = images[micro] if stage == 0 else pipeline.recv(np.empty((rows, WIDTHS[first])), before)
        out, seen = forward(x)
        passed.append((micro, out, seen))
        if stage < stages - 1:
            sending.append(pipeline.send_async(out, after))
    total = [np.zeros_like(w) for w in weights]
    for micro, out, seen in passed:  # … then all backward
        if stage == stages - 1:
            logs = out - out.max(1, keepdims=True)
            logs = logs - np.log(np.exp(logs).sum(1, keepdims=True))
            truth = np.eye(10)[labels[micro]]
            loss -= (logs * truth).sum() / (rows * MICRO)
            delta = (np.exp(logs) - truth) / (rows * MICRO)
        else:
            delta = pipeline.recv(np.empty((rows, WIDTHS[last])), after)
        delta, gradients = backward(delta, out, seen)
        if stage > 0:
            sending.append(pipeline.send_async(delta, before))
        total = [each + gradient for each, gradient in zip(total, gradients, strict=True)]
    for handle in sending:
        handle.wait()
    for w, gradient in zip(weights, rr.grouped_allreduce(total, name="gradients", process_set=team), strict=True):
        w -= RATE * gradient
    if stage == stages - 1:
        loss = rr.allreduce(loss, name="loss", process_set=team)
        if replica == 0 and step % 100 == 99:
            print(f"step {step + 1}: loss {loss:.12f}")
