"""diloco: against one process that does the same."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ringreduce as rr
import ringreduce.jax as hvd
from tests.support.local_steps import RATE, assert_close, gradient, simulated, start

WAYS = {
    "LocalSGD": {"sync_every": 4},
    "warm-up, Nesterov": {"sync_every": 4, "warmup_steps": 3, "momentum": 0.9, "lr": 0.7},
    "fragments": {"sync_every": 6, "fragments": 3},
    "inside a host": {"sync_every": 4, "hosts": [0] * hvd.size()},
}


def data(step):
    """A gradient is params * scale - offset, on each rank another."""
    return {name: gradient(np.zeros(each.shape), name, hvd.rank(), step) for name, each in start().items()}


@pytest.mark.parametrize("way", [pytest.param(each, marks=pytest.mark.quick) for each in WAYS])
def test_parameters_are_those_of_one_process_that_does_the_same(run, way):
    options = dict(WAYS[way])
    outer = rr.Nesterov(options.pop("lr"), options.pop("momentum")) if "lr" in options else None
    inner = optax.sgd(RATE)
    if options.pop("hosts", None):
        inner = hvd.DistributedOptimizer(inner, process_set=hvd.host_process_set)
    optimizer = rr.DiLoCo(inner, outer=outer, **options)

    @run
    def step(params, state, offsets):
        gradients = jax.tree.map(lambda each, offset: each * (1 + hvd.rank() / 2) + offset, params, offsets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    with jax.enable_x64():
        params = jax.tree.map(jnp.asarray, start())
        state = optimizer.init(params)
        for number in range(1, 14):
            params, state = step(params, state, data(number))
        averaged = hvd.allreduce(params)
    expected, anchors = simulated(hvd.size(), 13, **WAYS[way])
    assert_close(params, expected[hvd.rank()])
    assert_close(state.anchors, anchors)
    assert_close(averaged, {name: np.mean([each[name] for each in expected.values()], axis=0) for name in anchors})


@pytest.mark.quick
def test_what_cannot_be_done_is_refused():
    params = jnp.ones(3)
    with pytest.raises(TypeError, match=r"diloco: expected an optax gradient transformation, got a int; as in"):
        hvd.diloco(5, sync_every=4)
    with pytest.raises(rr.InputError, match=r"delay=2; expected 0, since an XLA program waits"):
        rr.DiLoCo(optax.sgd(0.1), sync_every=4, delay=2)
    optimizer = hvd.diloco(optax.sgd(0.1), sync_every=4)
    with pytest.raises(rr.InputError, match=r"diloco: update without params"):
        optimizer.update(params, optimizer.init(params))
    if hvd.size() > 1:
        other = hvd.diloco(optax.sgd(0.1), sync_every=4 + hvd.rank())
        with pytest.raises(rr.MismatchError, match=r"sync_every=\d, but rank 0 has sync_every=4"):
            other.update(params, other.init(params), params)
