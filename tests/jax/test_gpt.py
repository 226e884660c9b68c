"""The model of examples/train_gpt.py in JAX: after 50 steps the parameters of one process with the global batch."""

import jax
import numpy as np
import optax

import ringreduce.jax as hvd
from bench.jax_gpt import init, loss_of

RANK, SIZE = hvd.rank(), hvd.size()
SHAPE = {"width": 16, "depth": 2, "heads": 2, "context": 16}
BATCH, STEPS = 12, 50


def train(optimizer, params, share):
    @jax.jit
    def step(params, state, sequences):
        loss, gradients = jax.value_and_grad(loss_of)(params, sequences)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for number in range(STEPS):
        text = np.random.default_rng(number).integers(97, 105, (BATCH, SHAPE["context"] + 1))
        params, state, loss = step(params, state, share(text))
        losses.append(float(loss))
    return params, losses


def test_it_trains_as_one_process():
    mine = hvd.broadcast_parameters(init(jax.random.key(RANK), **SHAPE))
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.5, momentum=0.9))
    together, _ = train(optimizer, mine, lambda batch: batch[RANK::SIZE])
    alone, losses = train(optax.sgd(0.5, momentum=0.9), init(jax.random.key(0), **SHAPE), lambda batch: batch)
    assert losses[-1] < losses[0] - 1
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    digests = hvd.allgather_object([np.asarray(each).tobytes() for each in jax.tree.leaves(together)])
    assert all(each == digests[0] for each in digests), "bit-identical"
