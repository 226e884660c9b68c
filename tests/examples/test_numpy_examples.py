"""hello.py, numpy_lenet.py and model_parallel.py: what they say holds on any number of ranks."""

import functools
import importlib.util
import re
import sys

import numpy as np
import pytest

from tests.examples.conftest import EXAMPLES

ON_MORE = [1, pytest.param(2, marks=pytest.mark.extended), pytest.param(4, marks=pytest.mark.extended)]


@pytest.fixture
def lenet(monkeypatch):
    """examples/numpy_lenet.py as a module."""
    monkeypatch.setattr(sys, "argv", ["numpy_lenet.py"])
    spec = importlib.util.spec_from_file_location("numpy_lenet", EXAMPLES / "numpy_lenet.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.adapters
def test_gradients_of_lenet_are_those_of_finite_differences(lenet):
    draw = np.random.default_rng(1)
    parameters, images, labels = lenet.initial(), draw.random((5, 1, 8, 8)), draw.integers(0, 10, 5)
    *_, backward = lenet.loss_and_backward(parameters, images, labels)
    gradients = {(name, key): gradient for name, key, gradient in backward}
    assert [name for name, _ in gradients] == [name for name in reversed(lenet.SHAPES) for _ in "wb"]
    for (name, key), gradient in gradients.items():
        assert gradient.shape == parameters[name][key].shape
        for at in draw.integers(0, gradient.size, 8):
            place, losses = np.unravel_index(at, gradient.shape), []
            for step in (1e-6, -1e-6):
                parameters[name][key][place] += step
                losses.append(lenet.loss_and_backward(parameters, images, labels)[0])
                parameters[name][key][place] -= step
            assert gradient[place] == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4, abs=1e-8), (
                name,
                key,
                place,
            )


def losses_of(ended):
    return [float(each) for each in re.findall(r"loss (\d+\.\d{12})", ended.stdout)]


@pytest.fixture(scope="module")
def alone(ringrun):
    """alone(example): what it printed on one rank; run once."""
    return functools.cache(lambda example: ringrun(1, EXAMPLES / example))


@pytest.mark.parametrize("size", ON_MORE)
def test_lenet_learns_and_any_number_of_ranks_trains_the_same(ringrun, alone, size):
    ended = alone("numpy_lenet.py") if size == 1 else ringrun(size, EXAMPLES / "numpy_lenet.py")
    assert len(losses_of(ended)) == 10
    if size > 1:  # first: a wrong batch that learns all the same is seen here alone
        np.testing.assert_allclose(losses_of(ended), losses_of(alone("numpy_lenet.py")), rtol=0, atol=1e-10)
    assert float(re.findall(r"test accuracy (\d\.\d+)", ended.stdout)[-1]) >= 0.97


@pytest.mark.extended
@pytest.mark.parametrize(("size", "stages"), [(2, 2), (4, 2), (4, 4), (4, 1)])
def test_a_network_split_over_stages_and_replicas_trains_as_one(ringrun, alone, size, stages):
    split = losses_of(ringrun(size, EXAMPLES / "model_parallel.py", "--stages", str(stages)))
    whole = losses_of(alone("model_parallel.py"))
    assert len(whole) == 4
    assert whole[-1] < 0.1
    np.testing.assert_allclose(split, whole, rtol=0, atol=1e-10)


def test_hello_says_who_each_rank_is_and_what_they_have_together(ringrun):
    ended = ringrun(3, EXAMPLES / "hello.py")
    for rank in range(3):
        assert f"[{rank}] rank {rank} of 3, local rank {rank} of 3 on " in ended.stdout
        assert f"[{rank}] [{rank}. {rank}. {rank}.] here, [3. 3. 3.] summed over all ranks" in ended.stdout
    assert "[0] Open MPI " in ended.stdout or "[0] MPICH" in ended.stdout
    assert len(ended.stdout.splitlines()) == 7
