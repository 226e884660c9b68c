"""Recognise handwritten digits: a neural network in plain NumPy, trained by several processes at once.

    ringrun -np 4 python examples/train_digits.py

Needs scikit-learn (`pip install scikit-learn`), which brings the 1797 images of 8 x 8 pixels. Takes a few seconds.

Five things make a script data-parallel. Look for their numbers below:

    [1] rr.init()                    joins the processes that ringrun has started; each is called a rank
    [2] rr.broadcast_parameters()    lets all ranks start from the parameters of rank 0
    [3] batch[rr.rank() :: rr.size()]    each rank computes on its own share of every batch
    [4] rr.DistributedOptimizer()    averages the gradients of all ranks before every step
    [5] rr.allreduce()               averages or sums a number over all ranks, here the loss and the hits

The shares are equal, so the average of the ranks' gradients is the gradient of the whole batch: 1, 2 or 4 ranks train
the same model, and every rank ends with the same parameters to the last bit.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import ringreduce as rr

TEST_COUNT = 360  # of the 1797 images, never trained on


class Momentum:
    """Gradient descent with momentum. An object with step(grads) is all that rr.DistributedOptimizer asks for."""

    def __init__(self, params, lr, momentum=0.9):
        self.params, self.lr, self.momentum = params, lr, momentum
        self.velocity = {name: np.zeros_like(param) for name, param in params.items()}

    def step(self, grads):
        """Change the parameters in place, once."""
        for name, grad in grads.items():
            self.velocity[name] = self.momentum * self.velocity[name] - self.lr * grad
            self.params[name] += self.velocity[name]


def draw_params(rng):
    """Random weights and zero biases: one hidden layer of 128, and the ten digits."""
    weight1, weight2 = rng.normal(scale=(2 / 64) ** 0.5, size=(64, 128)), rng.normal(scale=0.125, size=(128, 10))
    return {"weight1": weight1, "bias1": np.zeros(128), "weight2": weight2, "bias2": np.zeros(10)}


def forward(params, images):
    """The hidden layer and the log-probabilities of the ten digits, one row for each image."""
    hidden = np.maximum(images @ params["weight1"] + params["bias1"], 0)
    scores = hidden @ params["weight2"] + params["bias2"]
    scores -= scores.max(axis=1, keepdims=True)  # so that exp cannot overflow
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def loss_and_grads(params, images, labels):
    """The mean cross-entropy of these images and its gradient for every parameter."""
    hidden, log_probs = forward(params, images)
    truth = np.eye(10)[labels]
    d_scores = (np.exp(log_probs) - truth) / len(labels)
    d_hidden = d_scores @ params["weight2"].T * (hidden > 0)
    grads = {"weight1": images.T @ d_hidden, "bias1": d_hidden.sum(axis=0)}
    grads |= {"weight2": hidden.T @ d_scores, "bias2": d_scores.sum(axis=0)}
    return -(log_probs * truth).sum() / len(labels), grads


def main(argv=None):
    """Train, test, and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="passes over the training images (%(default)s)")
    parser.add_argument("--batch", type=int, default=120, help="images per step, of all ranks together (%(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE.json", help="write losses and fingerprints there")
    args = parser.parse_args(argv)

    rr.init()  # [1]
    if args.batch % rr.size():
        sys.exit(f"--batch {args.batch} cannot be shared equally by {rr.size()} ranks; pass a multiple of {rr.size()}")

    shared_rng = np.random.default_rng(0)  # all ranks agree on which images are for the test, and on the others' order
    images, labels = load_digits(return_X_y=True)
    images = images / 16  # pixels are 0 to 16
    train, test = np.split(shared_rng.permutation(len(images)), [-TEST_COUNT])

    params = draw_params(np.random.default_rng(rr.rank()))  # others on every rank: the broadcast makes them alike
    rr.broadcast_parameters(params, root_rank=0)  # [2]
    optimizer = rr.DistributedOptimizer(Momentum(params, lr=0.2))  # [4]

    losses = []
    for epoch in range(args.epochs):
        order = shared_rng.permutation(train)  # a new one each epoch; the few images left over come up in another
        for start in range(0, len(order) - args.batch + 1, args.batch):
            share = order[start : start + args.batch][rr.rank() :: rr.size()]  # [3]
            loss, grads = loss_and_grads(params, images[share], labels[share])
            optimizer.step(grads)  # averages the gradients, then calls Momentum.step
            losses.append(float(rr.allreduce(loss)))  # [5] the loss of the whole batch
            rr.mark_step(examples=len(share))  # so that `ringrun scaling` knows how many images a step has
        if rr.rank() == 0:
            print(f"epoch {epoch + 1:2} of {args.epochs}: loss {losses[-1]:.4f}", flush=True)

    share = test[rr.rank() :: rr.size()]  # shares may differ in size here, so sum the hits and divide once
    _, log_probs = forward(params, images[share])
    hits = rr.allreduce(np.sum(log_probs.argmax(axis=1) == labels[share]), op=rr.Sum)  # [5]

    bits = b"".join(params[name].tobytes() for name in sorted(params))
    digests = rr.allgather_object(hashlib.blake2b(bits, digest_size=8).hexdigest())  # equal only if every bit is
    if len(set(digests)) > 1:
        sys.exit(f"the ranks' parameters differ: fingerprints {digests}, by rank; expected equal ones")
    if rr.rank() == 0:
        if args.record:
            args.record.write_text(json.dumps({"losses": losses, "digests": digests}))
        print(f"parameters are identical on all {rr.size()} ranks: fingerprint {digests[0]}")
        print(f"test accuracy: {hits / TEST_COUNT:.3f}")


if __name__ == "__main__":
    main()
