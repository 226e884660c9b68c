"""The model of examples/train_gpt.py in JAX: after 50 steps the parameters of one process with the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringreduce.jax as hvd

RANK, SIZE = hvd.rank(), hvd.size()
WIDTH, DEPTH, HEADS, CONTEXT, BATCH, STEPS = 16, 2, 2, 16, 12, 50


def init(key):
    keys = iter(jax.random.split(key, 100))

    def weight(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    def block():
        return {
            "norm1": jnp.ones(WIDTH),
            "query_key_value": weight(WIDTH, 3, HEADS, WIDTH // HEADS),
            "project": weight(WIDTH, WIDTH),
            "norm2": jnp.ones(WIDTH),
            "up": weight(WIDTH, 4 * WIDTH),
            "down": weight(4 * WIDTH, WIDTH),
        }

    blocks = [block() for _ in range(DEPTH)]
    return {
        "token": weight(256, WIDTH), "position": weight(CONTEXT, WIDTH), "blocks": blocks, "head": weight(WIDTH, 256)
    }  # fmt: skip


def norm(x, scale):
    return scale * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def loss_of(params, sequences):
    x = params["token"][sequences[:, :-1]] + params["position"]
    for block in params["blocks"]:
        projected = jnp.einsum("btw,wkhd->kbthd", norm(x, block["norm1"]), block["query_key_value"])
        attended = jax.nn.dot_product_attention(*projected, is_causal=True)
        x = x + attended.reshape(x.shape) @ block["project"]
        x = x + jax.nn.gelu(norm(x, block["norm2"]) @ block["up"]) @ block["down"]
    scores = norm(x, 1.0) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, sequences[:, 1:]).mean()


def train(optimizer, params, share):
    @jax.jit
    def step(params, state, sequences):
        loss, gradients = jax.value_and_grad(loss_of)(params, sequences)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for number in range(STEPS):
        text = np.random.default_rng(number).integers(97, 105, (BATCH, CONTEXT + 1))
        params, state, loss = step(params, state, share(text))
        losses.append(float(loss))
    return params, losses


def test_it_trains_as_one_process():
    mine = hvd.broadcast_parameters(init(jax.random.key(RANK)))
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.5, momentum=0.9))
    together, _ = train(optimizer, mine, lambda batch: batch[RANK::SIZE])
    alone, losses = train(optax.sgd(0.5, momentum=0.9), init(jax.random.key(0)), lambda batch: batch)
    assert losses[-1] < losses[0] - 1
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    digests = hvd.allgather_object([np.asarray(each).tobytes() for each in jax.tree.leaves(together)])
    assert all(each == digests[0] for each in digests), "bit-identical"
