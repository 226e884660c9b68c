"""Softmax regression on handwritten digits by a parameter server: two ranks hold the parameters, the others train.

    ringrun -np 6 --servers 2 python examples/parameter_server.py
    ringrun -np 6 --servers 2 python examples/parameter_server.py --mode async
    ringrun -np 6 --servers 2 python examples/parameter_server.py --mode ssp --staleness 3

In mode sync all workers go in step, as with a ring; in the others a slow worker holds nobody up.
"""

import argparse

import numpy as np
from sklearn.datasets import load_digits

import ringreduce as rr

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["sync", "async", "ssp"], default="sync")
parser.add_argument("--staleness", type=int, help="of ssp: most steps between the fastest and the slowest worker")
parser.add_argument("--epochs", type=int, default=10)
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = images / 16
train, test = np.split(np.random.default_rng(0).permutation(len(images)), [1500])


def scores(parameters, images):
    """Of the ten classes, (images, 10)."""
    return images @ parameters["w"] + parameters["b"]


def gradients(parameters, images, labels):
    """Of the cross entropy, by hand."""
    logits = scores(parameters, images)
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    probabilities[np.arange(len(labels)), labels] -= 1
    return {"w": images.T @ probabilities / len(labels), "b": probabilities.mean(0)}


def descend(parameters, gradients):
    """The servers' rule."""
    for name, gradient in gradients.items():
        parameters[name] -= 0.5 * gradient


rr.init()
if rr.ps.is_server():
    served = rr.ps.Server(descend, options.mode, options.staleness).serve()
    megabytes = f"{served.nbytes_received / 1e6:.1f} MB came, {served.nbytes_sent / 1e6:.1f} MB went"
    print(f"server: {served.pushes} pushes; {megabytes}; a worker was up to {served.most_stale} steps ahead")
else:
    with rr.ps.Worker({"w": np.zeros((64, 10)), "b": np.zeros(10)}) as worker:
        sampler = rr.DistributedSampler(1500, num_replicas=worker.count, rank=worker.index)
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for batch in sampler.batches(16):
                parameters = worker.pull()
                worker.push(gradients(parameters, images[train][batch], labels[train][batch]))
        if worker.index == 0:
            right = scores(worker.pull(), images[test]).argmax(1) == labels[test]
            print(f"mode {options.mode}: test accuracy {right.mean():.3f}")
