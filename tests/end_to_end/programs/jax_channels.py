"""One jitted function calls two ordered channels."""

import jax
import jax.numpy as jnp

import ringreduce.jax as hvd

hvd.init()
channels = hvd.ordered(), hvd.ordered()


@jax.jit
def program(x):
    return [hvd.allreduce(x * number, op=hvd.Sum, process_set=each) for number, each in enumerate(channels, 1)]


sums = [each.item() for each in program(jnp.float32(1 + hvd.rank()))]
print(f"sums {sums}")
