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
import itertools
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
        self.params = params
        self.lr = lr
        self.momentum = momentum
        self.velocity = {name: np.zeros_like(param) for name, param in params.items()}

    def step(self, grads):
        """Change the parameters in place, once."""
        for name, grad in grads.items():
            self.velocity[name] = self.momentum * self.velocity[name] - self.lr * grad
            self.params[name] += self.velocity[name]


def draw_params(rng, widths):
    """Random weights and zero biases for layers of these widths."""
    params = {}
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(widths), start=1):
        params[f"weight{layer}"] = rng.normal(scale=np.sqrt(2 / fan_in), size=(fan_in, fan_out))
        params[f"bias{layer}"] = np.zeros(fan_out)
    return params


def forward(params, images):
    """The hidden layer and the log-probabilities of the ten digits, one row for each image."""
    hidden = np.maximum(images @ params["weight1"] + params["bias1"], 0)
    scores = hidden @ params["weight2"] + params["bias2"]
    scores -= scores.max(axis=1, keepdims=True)  # so that exp cannot overflow
    return hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def loss_and_grads(params, images, labels):
    """The mean cross-entropy of these images and its gradient for every parameter."""
    hidden, log_probs = forward(params, images)
    rows = np.arange(len(labels))
    loss = -log_probs[rows, labels].mean()

    d_scores = np.exp(log_probs)
    d_scores[rows, labels] -= 1
    d_scores /= len(labels)
    d_hidden = d_scores @ params["weight2"].T * (hidden > 0)
    grads = {
        "weight1": images.T @ d_hidden,
        "bias1": d_hidden.sum(axis=0),
        "weight2": hidden.T @ d_scores,
        "bias2": d_scores.sum(axis=0),
    }
    return loss, grads


def digest(params):
    """A short fingerprint of the parameters' bytes: equal only if every bit is."""
    fingerprint = hashlib.blake2b(digest_size=8)
    for name in sorted(params):
        fingerprint.update(params[name].tobytes())
    return fingerprint.hexdigest()


def parse(argv):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="passes over the training images (%(default)s)")
    parser.add_argument("--batch", type=int, default=120, help="images per step, of all ranks together (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.2, help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for the parameters and the order (%(default)s)")
    parser.add_argument("--record", type=Path, metavar="FILE.json", help="write losses and fingerprints there")
    return parser.parse_args(argv)


def main(argv=None):
    """Train, test, and print the accuracy."""
    args = parse(argv)

    rr.init()  # [1]
    if args.batch % rr.size():
        sys.exit(
            f"--batch {args.batch} cannot be shared equally by {rr.size()} ranks; pass a multiple of {rr.size()}, "
            f"such as --batch {args.batch + -args.batch % rr.size()}"
        )

    # The same seed on every rank: all agree on which images are for the test, and on the order of the others.
    shared_rng = np.random.default_rng(args.seed)
    images, labels = load_digits(return_X_y=True)
    images = images / 16  # pixels are 0 to 16
    train, test = np.split(shared_rng.permutation(len(images)), [-TEST_COUNT])

    # Another seed on every rank, as in a script that sets none: it is the broadcast that makes them start alike.
    params = draw_params(np.random.default_rng([args.seed, rr.rank()]), widths=[64, 128, 10])
    rr.broadcast_parameters(params, root_rank=0)  # [2]
    optimizer = rr.DistributedOptimizer(Momentum(params, args.lr))  # [4]

    losses = []
    steps_per_epoch = len(train) // args.batch
    for epoch in range(args.epochs):
        order = shared_rng.permutation(train)  # a new one each epoch; the few images left over come up in another
        for step in range(steps_per_epoch):
            batch = order[step * args.batch : (step + 1) * args.batch]
            share = batch[rr.rank() :: rr.size()]  # [3]
            loss, grads = loss_and_grads(params, images[share], labels[share])
            optimizer.step(grads)  # averages the gradients, then calls Momentum.step
            losses.append(float(rr.allreduce(loss)))  # [5] the loss of the whole batch
        if rr.rank() == 0:
            print(f"epoch {epoch + 1:2} of {args.epochs}: loss {np.mean(losses[-steps_per_epoch:]):.4f}", flush=True)

    share = test[rr.rank() :: rr.size()]  # shares may differ in size here, so sum the hits and divide once
    _, log_probs = forward(params, images[share])
    hits = rr.allreduce(np.sum(log_probs.argmax(axis=1) == labels[share]), op=rr.Sum)  # [5]

    digests = rr.allgather_object(digest(params))
    if len(set(digests)) > 1:
        sys.exit(f"the ranks' parameters differ: fingerprints {digests}, by rank; expected equal ones")
    if rr.rank() == 0:
        if args.record:
            args.record.write_text(json.dumps({"losses": losses, "digests": digests}))
        print(f"parameters are identical on all {rr.size()} ranks: fingerprint {digests[0]}")
        print(f"test accuracy: {hits / TEST_COUNT:.3f}")


if __name__ == "__main__":
    main()
