"""The model of examples/train_gpt.py in JAX, for bench/jax_step.py and tests/jax/test_gpt.py."""

import jax
import jax.numpy as jnp
import optax


def init(key, width, depth, heads, context):
    """Random parameters, a tree; text is in bytes."""
    keys = iter(jax.random.split(key, 100))

    def weight(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    def block():
        return {
            "norm1": jnp.ones(width),
            "query_key_value": weight(width, 3, heads, width // heads),
            "project": weight(width, width),
            "norm2": jnp.ones(width),
            "up": weight(width, 4 * width),
            "down": weight(4 * width, width),
        }

    blocks = [block() for _ in range(depth)]
    return {
        "token": weight(256, width), "position": weight(context, width), "blocks": blocks, "head": weight(width, 256)
    }  # fmt: skip


def norm(x, scale):
    """Layer norm without a bias."""
    return scale * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def loss_of(params, sequences):
    """How badly each next byte is predicted; sequences: (batch, context + 1)."""
    x = params["token"][sequences[:, :-1]] + params["position"]
    for block in params["blocks"]:
        projected = jnp.einsum("btw,wkhd->kbthd", norm(x, block["norm1"]), block["query_key_value"])
        attended = jax.nn.dot_product_attention(*projected, is_causal=True)
        x = x + attended.reshape(x.shape) @ block["project"]
        x = x + jax.nn.gelu(norm(x, block["norm2"]) @ block["up"]) @ block["down"]
    scores = norm(x, 1.0) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, sequences[:, 1:]).mean()
