"""DistributedOptimizer around plain NumPy optimizers of every form."""

from typing import NamedTuple

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import run_ranks
from tests.reference import data

SIZE = 3


def gradients(rank):
    return {
        "w": data("float32", 20, rank).reshape(4, 5),
        "layers": [data("float64", 3, rank, 1), (data("float32", 1, rank), None)],
    }


def mean(pick):
    return np.mean([pick(gradients(rank)) for rank in range(SIZE)], axis=0)


def assert_averaged(grads):
    np.testing.assert_allclose(grads["w"], mean(lambda g: g["w"]), rtol=1e-6)
    np.testing.assert_allclose(grads["layers"][0], mean(lambda g: g["layers"][0]))
    assert grads["layers"][1][1] is None


class Stepping:
    def __init__(self):
        self.lr = 0.1

    def step(self, grads, scale=1):
        self.seen = grads
        return scale


class Updating:
    def update(self, params, grads, *, decay=0):
        self.seen = grads
        return params, decay


class Applying:
    def apply_gradients(self, pairs):
        self.seen = list(pairs)


def on_every_rank(program):
    return run_ranks(SIZE, program)


def test_step():
    def program():
        mine = gradients(rr.rank())
        inner = Stepping()
        optimizer = rr.DistributedOptimizer(inner)
        assert optimizer.step(mine, scale=2) == 2
        assert_averaged(inner.seen)
        optimizer.step(grads=mine)
        assert_averaged(inner.seen)
        np.testing.assert_array_equal(mine["w"], gradients(rr.rank())["w"], err_msg="the caller's arrays stay")

    on_every_rank(program)


def test_update():
    def program():
        inner = Updating()
        optimizer = rr.DistributedOptimizer(inner)
        assert optimizer.update("params", gradients(rr.rank()), decay=1) == ("params", 1)
        assert_averaged(inner.seen)
        assert optimizer.update("params", grads=gradients(rr.rank())) == ("params", 0)
        assert_averaged(inner.seen)

    on_every_rank(program)


def test_apply_gradients():
    def program():
        inner = Applying()
        grads = gradients(rr.rank())
        rr.DistributedOptimizer(inner).apply_gradients(zip([grads["w"], None], ["w", "unused"], strict=True))
        (averaged, name), unused = inner.seen
        np.testing.assert_allclose(averaged, mean(lambda g: g["w"]), rtol=1e-6)
        assert (name, unused) == ("w", (None, "unused"))

    on_every_rank(program)


def test_a_callable():
    def program():
        seen = []
        rr.DistributedOptimizer(seen.append)(gradients(rr.rank()))
        assert_averaged(seen[0])

    on_every_rank(program)


def test_another_op():
    def program():
        seen = []
        rr.DistributedOptimizer(seen.append, op=rr.Max)([np.float64(rr.rank())])
        return seen[0][0]

    assert on_every_rank(program) == [SIZE - 1] * SIZE


def test_attributes_are_the_wrapped_optimizers():
    def program():
        inner = Stepping()
        optimizer = rr.DistributedOptimizer(inner)
        assert optimizer.lr == 0.1
        optimizer.lr = 0.5
        assert inner.lr == 0.5
        with pytest.raises(AttributeError, match="momentum"):
            _ = optimizer.momentum
        assert "Stepping" in repr(optimizer)

    on_every_rank(program)


class Optax(NamedTuple):
    init: object
    update: object


@pytest.mark.parametrize("wrong", [object(), 3, Optax(print, print)])
def test_what_fits_none_gets_the_list_of_forms(wrong):
    def program():
        with pytest.raises(
            TypeError, match=r"expected one of\n.*torch.optim.Optimizer\n.*step\(grads\), update\(params"
        ):
            rr.DistributedOptimizer(wrong)

    on_every_rank(program)


def test_calls_without_gradients_are_told():
    def program():
        with pytest.raises(TypeError, match="no gradients were passed; expected them as grads"):
            rr.DistributedOptimizer(Stepping()).step()
        with pytest.raises(TypeError, match=r"apply_gradients expects the \(gradient, parameter\) pairs first"):
            rr.DistributedOptimizer(Applying()).apply_gradients()
        with pytest.raises(rr.InputError, match="backward_passes_per_step are options for torch optimizers only"):
            rr.DistributedOptimizer(Stepping(), backward_passes_per_step=2)

    on_every_rank(program)


def test_gradients_that_differ_in_form_are_named():
    def program():
        grads = {"w": np.zeros(3), ("b" if rr.rank() == 1 else "c"): np.zeros(2)}
        with pytest.raises(rr.MismatchError, match=r"rank 1 of 3, allreduce 'b' .*: name 'b', but rank 0 has name 'c'"):
            rr.DistributedOptimizer(print)(grads)

    on_every_rank(program)


def test_it_wants_init_first():
    with pytest.raises(rr.NotInitializedError, match=r"DistributedOptimizer\(\): ringreduce has not been initialized"):
        rr.DistributedOptimizer(Stepping())
