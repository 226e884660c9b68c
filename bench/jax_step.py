"""What reducing costs inside a jitted step of JAX: a step, the same without communication, and the reduction alone.

    ringrun -np 2 python bench/jax_step.py

Two models: the network of examples/jax_optax.py (4 arrays, 9,610 parameters), and a stack of layers of GPT's
shapes (24 arrays, 3 M). `share` is step / (compute + reduce): medians, each until the last rank is done. Reduce is
ringreduce's grouped_allreduce of the same gradients as NumPy arrays. Results are checked.
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringreduce as rr
import ringreduce.jax as hvd

ROUNDS = 11


def median_ms(*functions):
    """The median time of each; they take turns, and ranks begin together."""
    times = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, own in zip(functions, times, strict=True):
            rr.barrier()
            start = time.perf_counter()
            jax.block_until_ready(function())
            rr.barrier()
            own.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(each) for each in times]


def loss_of(params, x):
    """Of a stack of layers."""
    for weight, bias in params:
        x = jnp.tanh(x @ weight + bias)
    return (x**2).mean()


def measure(name, widths, rows):
    """Print a row of the table."""
    keys = jax.random.split(jax.random.key(0), len(widths))
    pairs = zip(keys, widths[:-1], widths[1:], strict=False)
    params = [(jax.random.normal(key, (a, b)) / a**0.5, jnp.zeros(b)) for key, a, b in pairs]
    x = jax.random.normal(jax.random.key(rr.rank()), (rows, widths[0]))

    def step_with(optimizer):
        state = optimizer.init(params)

        @jax.jit
        def step(x):
            updates, _ = optimizer.update(jax.grad(loss_of)(params, x), state, params)
            return optax.apply_updates(params, updates)

        return lambda: step(x)

    gradients = jax.tree.leaves(jax.jit(jax.grad(loss_of))(params, x))
    arrays = [np.asarray(each) for each in gradients]
    sgd = optax.sgd(0.1)
    together, alone = step_with(hvd.DistributedOptimizer(sgd)), step_with(sgd)
    expected = [p - 0.1 * g for p, g in zip(jax.tree.leaves(params), rr.grouped_allreduce(arrays), strict=True)]
    for mine, other in zip(jax.tree.leaves(together()), expected, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)
    alone()
    step, compute, reduce = median_ms(together, alone, lambda: rr.grouped_allreduce(arrays, name="reduce"))
    if rr.rank() == 0:
        print(f"{name:8} {step:9.2f} {compute:9.2f} {reduce:9.2f} {step / (compute + reduce):7.2f}", flush=True)


rr.init()
if rr.rank() == 0:
    print(f"ringreduce.jax, {rr.size()} ranks, JAX {jax.__version__}, times in ms\n")
    print(f"{'model':8} {'step':>9} {'compute':>9} {'reduce':>9} {'share':>7}")
measure("digits", [64, 128, 10], 60)
measure("gpt", [256, *[1024, 256] * 6], 1536)
