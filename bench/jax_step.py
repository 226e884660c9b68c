"""What reducing costs inside a jitted step of JAX: a step, the same without communication, and the reduction alone.

    ringrun -np 2 python bench/jax_step.py

Two models: the network of examples/jax_optax.py (4 arrays, 9,610 parameters), and that of examples/train_gpt.py
(27 arrays, 3.3 M). `share` is step / (compute + reduce): medians, each until the last rank is done. Reduce is
ringreduce's grouped_allreduce of the same gradients as NumPy arrays. `passed` is the same step whose function on the
host copies the gradients as they are: what JAX takes to call it. Of each a row by jax.jit, and one by hvd.jit. Results
are checked. The last line is what a call of a jitted function that does nothing takes.
"""

from __future__ import annotations

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import io_callback
from jax_gpt import init, loss_of

import ringreduce as rr
import ringreduce.jax as hvd
from ringreduce.jax.host import HostCollective

ROUNDS = 30
CALLS = 300


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


def digits_loss(params, x):
    """Of two layers."""
    for weight, bias in params:
        x = jnp.tanh(x @ weight + bias)
    return (x**2).mean()


def measure(name, loss, params, x):
    """Print a row of the table."""

    def step_with(optimizer, jit):
        state = optimizer.init(params)

        @jit
        def step(params, x):
            updates, _ = optimizer.update(jax.grad(loss)(params, x), state, params)
            return optax.apply_updates(params, updates)

        return lambda: step(params, x)

    gradients = jax.tree.leaves(jax.jit(jax.grad(loss))(params, x))
    arrays = [np.asarray(each) for each in gradients]
    sgd = optax.sgd(0.1)
    alone = step_with(sgd, jax.jit)
    expected = [p - 0.1 * g for p, g in zip(jax.tree.leaves(params), rr.grouped_allreduce(arrays), strict=True)]
    alone()
    for kind, jit in (("jax.jit", jax.jit), ("hvd.jit", hvd.jit)):
        together = step_with(hvd.DistributedOptimizer(sgd), jit)
        for mine, other in zip(jax.tree.leaves(together()), expected, strict=True):
            np.testing.assert_allclose(mine, other, atol=1e-6)

        def passed(together=together):
            own, HostCollective.run = HostCollective.run, lambda self, arrays, *_: arrays
            try:
                return jax.block_until_ready(together())
            finally:
                HostCollective.run = own

        functions = together, alone, lambda: rr.grouped_allreduce(arrays, name="reduce"), passed
        times = median_ms(*functions)
        if rr.rank() == 0:
            figures = [*times, times[0] / (times[1] + times[2])]
            print(f"{name:7} {kind:7}" + "".join(f"{each:9.2f}" for each in figures), flush=True)


def dispatch_us(function):
    """The median time of a call of a jitted function, until its result is there."""
    compiled, x = jax.jit(function), jnp.float32(1.0)
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        compiled(x).block_until_ready()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def identity(x):
    """What the host does, when it is called."""
    return x


rr.init()
if rr.rank() == 0:
    print(f"ringreduce.jax, {rr.size()} ranks, JAX {jax.__version__}, times in ms\n")
    print(f"{'model':15}" + "".join(f"{each:>9}" for each in ("step", "compute", "reduce", "passed", "share")))
keys = jax.random.split(jax.random.key(0))
layers = [
    (jax.random.normal(key, (a, b)) / 8, jnp.zeros(b)) for key, a, b in zip(keys, (64, 128), (128, 10), strict=True)
]
measure("digits", digits_loss, layers, jax.random.normal(jax.random.key(rr.rank()), (60, 64)))
text = np.random.default_rng(rr.rank()).integers(97, 105, (2, 65))
measure("gpt", loss_of, init(jax.random.key(0), width=256, depth=4, heads=4, context=64), text)
kind = jax.ShapeDtypeStruct((), jnp.float32)
no_host, host, in_order = map(
    dispatch_us,
    (
        lambda x: x + 1,
        lambda x: jax.pure_callback(identity, kind, x),
        lambda x: io_callback(identity, kind, x, ordered=True),
    ),
)
if rr.rank() == 0:
    print(f"\na call: {no_host:.0f} µs; one that calls the host {host:.0f}, in the program's order {in_order:.0f}")
