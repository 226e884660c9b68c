"""ShardedOptimizer of NumPy's arrays, on threads."""

import copy

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks

DETERMINISTIC = Settings(deterministic=True)
SHAPES = {"a": (7, 3), "layers": [(5,), (2, 2)], "c": (1,)}


class Momentum:
    """Its attributes are its state."""

    def __init__(self, params):
        self.params, self.lr = params, 0.1
        self.velocity = rr.trees.map_leaves(params, lambda _, each: np.zeros_like(each))

    def step(self, grads):
        named = [dict(rr.trees.named_leaves(each)) for each in (self.params, self.velocity, grads)]
        for name, grad in named[2].items():
            named[1][name][...] = 0.9 * named[1][name] + grad
            named[0][name] -= self.lr * named[1][name]


class Saved(Momentum):
    """It has a state_dict, without the parameters."""

    def state_dict(self):
        return {"velocity": self.velocity, "lr": self.lr}

    def load_state_dict(self, state):
        self.velocity, self.lr = state["velocity"], state["lr"]


def new_params():
    of = lambda shape, at: np.cos(np.arange(np.prod(shape)) + at).reshape(shape).astype("f8" if at == 3 else "f4")  # noqa: E731
    return {"a": of((7, 3), 0), "layers": [of((5,), 1), None, of((2, 2), 2)], "c": of((1,), 3)}


def grads_of(params, step, rank=None):
    rank = rr.rank() if rank is None else rank
    return rr.trees.map_leaves(params, lambda name, each: each * (1 + rank) + each.dtype.type(np.sin(step + len(name))))


def same(ones, others):
    for (name, one), (other_name, other) in zip(*map(rr.trees.named_leaves, (ones, others)), strict=True):
        assert name == other_name
        np.testing.assert_array_equal(one, other, strict=isinstance(one, np.ndarray))


@pytest.mark.parametrize("kind", [Momentum, Saved])
@pytest.mark.parametrize(
    ("hosts", "shared"), [([0], False), ([0, 0, 0], False), ([0, 0, 0], True), ([0, 1, 1, 0], False)], ids=str
)
def test_the_bits_are_those_of_a_distributed_optimizer_and_so_is_the_state(hosts, shared, kind):
    def program():
        params, whole = new_params(), new_params()
        plain = rr.DistributedOptimizer(kind(whole), backward_passes_per_step=2)
        optimizer = rr.ShardedOptimizer(kind, params, backward_passes_per_step=2, shared_parameters=shared)
        assert (optimizer.params is params) == (not shared)
        params = optimizer.params
        same(optimizer.state_dict(), plain.state_dict())
        for step in range(8):
            plain.step(grads_of(whole, step))
            optimizer.step(grads_of(params, step))
            same(params, whole)
        kept = sum(each.size for _, each in rr.trees.named_leaves(optimizer.optimizer.velocity))
        assert kept <= 31 // rr.size() + 2
        state = optimizer.state_dict()
        same(state, plain.state_dict())
        return state

    states = run_ranks(len(hosts), program, hosts=hosts, settings=DETERMINISTIC)

    def goes_on():
        """At another number of ranks, with gradients that are equal."""
        params, whole, saved = new_params(), new_params(), copy.deepcopy(states[0])
        optimizer, alone = rr.ShardedOptimizer(kind, params), kind(whole)
        optimizer.load_state_dict(states[0])
        vars(alone).update(saved)
        for tree in (alone.params, params) if kind is Saved else ():
            rr.trees.map_leaves(tree, lambda name, each: each.__setitem__(..., 1))
        same(params, alone.params)
        for step in range(2):
            grads = grads_of(params, step, rank=3)
            alone.step(grads)
            optimizer(grads)
            same(params, alone.params)

    run_ranks(2, goes_on, settings=DETERMINISTIC)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Momentum(new_params()),), "got a Momentum; expected a torch optimizer, or a function that makes"),
        ((Momentum, np.ones((3, 3)).T[:2]), "'' is a ndarray that cannot be cut in place"),
        ((Momentum, {"a": 1.0}), "'a' is a float that cannot be cut in place"),
    ],
    ids=["an object", "transposed", "a number"],
)
def test_what_cannot_be_cut_is_refused(arguments, message):
    class OnGpu:
        flags = np.ones(1).flags

    def program():
        with pytest.raises(rr.InputError, match=message):
            rr.ShardedOptimizer(*arguments)
        with pytest.raises(rr.InputError, match="overlap: only for a torch optimizer"):
            rr.ShardedOptimizer(Momentum, new_params(), overlap=[])
        optimizer = rr.ShardedOptimizer(Momentum, {"a": np.zeros(3)})
        with pytest.raises(rr.InputError, match="not of the form and shapes of the parameters"):
            optimizer.step({"a": np.zeros(4)})
        optimizer = rr.ShardedOptimizer(lambda pieces: lambda grads: pieces.update(a=1), {"a": np.zeros(3)})
        with pytest.raises(rr.InputError, match="has another array for 'a' now; change it in place"):
            optimizer({"a": np.zeros(3)})

    def on_two():
        with pytest.raises(rr.InputError, match=r"shared_parameters=True\): expected NumPy arrays"):
            rr.ShardedOptimizer(Momentum, {"a": OnGpu()}, shared_parameters=True)

    run_ranks(1, program)
    run_ranks(2, on_two)


def test_an_elastic_state_of_ranks_that_have_changed():
    def began():
        params = new_params()
        optimizer = rr.ShardedOptimizer(Saved, params)
        state = rr.elastic.ObjectState(params=params, optimizer=optimizer, step=0)
        state.sync()
        for state.step in range(3):
            optimizer.step(grads_of(params, state.step, rank=1))
            state.commit()
        optimizer.step(grads_of(params, 9))
        return state

    states = run_ranks(3, began)

    def goes_on():
        state = states[rr.rank()]
        with pytest.raises(rr.InputError, match="the ranks have changed"):
            state.optimizer.step(grads_of(state.params, 3))
        state.restore()
        state.sync()
        state.optimizer.optimizer.lr = 0.3
        state.optimizer.step(grads_of(state.params, 3, rank=1))
        return state.params

    whole = new_params()
    alone = Saved(whole)
    for step in range(4):
        alone.lr = 0.1 if step < 3 else 0.3
        alone.step(grads_of(whole, step, rank=1))
    for params in run_ranks(2, goes_on):
        rr.trees.map_leaves(
            params,
            lambda name, each: np.testing.assert_allclose(each, dict(rr.trees.named_leaves(whole))[name], rtol=1e-5),
        )


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_may_have_the_parameters_in_another_order(shared):
    """As dicts that are made from sets; two arrays are of one shape."""

    def program():
        names = ["b", "a", "c"] if rr.rank() else ["a", "c", "b"]
        params = {name: np.full(3, float(ord(name))) for name in names}
        optimizer = rr.ShardedOptimizer(Momentum, params, shared_parameters=shared)
        for step in range(3):
            optimizer.step({name: np.full(3, ord(name) * (0.0 + rr.rank() + step)) for name in reversed(names)})
        return {name: optimizer.params[name].copy() for name in "abc"}

    found, alone = run_ranks(2, program), {name: np.full(3, float(ord(name))) for name in "abc"}
    plain = Momentum(alone)
    for step in range(3):
        plain.step({name: np.full(3, ord(name) * (0.5 + step)) for name in "abc"})
    for each in found:
        np.testing.assert_allclose([each[name] for name in "abc"], [alone[name] for name in "abc"])


def test_shared_memory_is_refused_where_a_rank_has_other_parameters():
    def program():
        params = {"a": np.ones(2 + rr.rank()), "b": np.ones(3)}
        with pytest.raises(
            rr.InputError, match=r"parameter 'a' is float64\[3\] on rank 1, float64\[2\] on rank 0; expec"
        ):
            rr.ShardedOptimizer(Momentum, params, shared_parameters=True)

    run_ranks(2, program)
