"""Recognise handwritten digits on ranks that may die: training goes on in the processes that are left.

    ringrun --elastic -np 4 --min-np 2 python examples/elastic_digits.py --step-s 0.05

Each epoch's line says which ranks there are, and their process ids. Kill some of them, from another terminal:

    kill -9 PID

ringrun says who was lost; the others go back to the last commit, which is at most one step, share what is left of the
epoch, and go on. With `--spares 1`, one of the four waits until it takes a dead one's place.

Needs scikit-learn (`pip install scikit-learn`). What makes a script elastic, beside what makes it data-parallel
(examples/train_digits.py), has numbers below:

    [1] rr.elastic.ObjectState()     all that changes while training, and only that
    [2] rr.elastic.ElasticSampler()  which images of this epoch are left, divided among the ranks that there are
    [3] @rr.elastic.run              the function begins again when ranks have died: so it begins where the state says
    [4] state.commit()               after a step: this is where it goes back to

Average divides by the ranks that there are, so a step on three ranks is one on a smaller batch.
"""

import argparse
import os
import time

import numpy as np
from sklearn.datasets import load_digits
from train_digits import TEST_COUNT, draw_params, forward, loss_and_grads  # the network, and its gradients

import ringreduce as rr


@rr.elastic.run  # [3]
def train(state, args, images, labels):
    """Train from where the state is to the last epoch."""
    while state.epoch < args.epochs:
        for number, batch in enumerate(state.sampler.batches(args.batch)):
            _, grads = loss_and_grads(state.params, images[batch], labels[batch])
            names = sorted(grads)
            reduced = rr.grouped_allreduce([grads[name] for name in names], names=names)
            for name, grad in zip(names, reduced, strict=True):
                state.params[name] -= args.lr * grad
            time.sleep(args.step_s)
            state.sampler.record_batch(number, args.batch)
            state.commit()  # [4]
        pids = rr.allgather_object(os.getpid())
        if rr.rank() == 0:
            print(f"epoch {state.epoch + 1:2} of {args.epochs}: {rr.size()} ranks, processes {pids}", flush=True)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


def main():
    """Train, test, and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25, help="passes over the training images (%(default)s)")
    parser.add_argument("--batch", type=int, default=30, help="images per step, of each rank (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.5, help="learning rate (%(default)s)")
    parser.add_argument("--step-s", type=float, default=0.0, help="longer steps, so that you can kill ranks")
    args = parser.parse_args()

    rr.init()
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order] / 16, labels[order]  # pixels are 0 to 16
    params = draw_params(np.random.default_rng(rr.rank()))  # those of rank 0 go to all, when train() begins
    sampler = rr.elastic.ElasticSampler(len(images) - TEST_COUNT)  # [2]
    train(rr.elastic.ObjectState(params=params, sampler=sampler, epoch=0), args, images, labels)  # [1]

    share = slice(-TEST_COUNT + rr.rank(), None, rr.size())
    _, log_probs = forward(params, images[share])
    hits = rr.allreduce(np.sum(log_probs.argmax(axis=1) == labels[share]), op=rr.Sum)
    if rr.rank() == 0:
        print(f"test accuracy: {hits / TEST_COUNT:.3f}")


if __name__ == "__main__":
    main()
