"""PowerSGD: equal to a plain simulation of all ranks, whatever travels together; its state, and what it refuses."""

import zlib

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of, known
from tests.support.reference import data

RANK, STEPS = 2, 5
SHAPES = {"layer.w": (20, 30), "conv": (12, 5, 3, 3), "table": (40, 6), "bias": (30,), "small": (3, 4), "none": (0, 9)}
TYPES = {"table": "float64", "conv": "float16"}


def gradient(name, rank, step):
    count = int(np.prod(SHAPES[name]))
    return data(TYPES.get(name, "float32"), count, rank, step + 100 * len(name)).reshape(SHAPES[name])


class Simulated:
    """All ranks of one gradient, in float64."""

    def __init__(self, name, ranks):
        self.shape = SHAPES[name]
        self.rows, columns = self.shape[0], int(np.prod(self.shape[1:]))
        self.is_plain = len(self.shape) < 2 or RANK * (self.rows + columns) >= self.rows * columns
        self.q = np.random.default_rng(zlib.crc32(name.encode())).standard_normal((RANK, columns)).T
        self.residuals = [0] * ranks

    def mean(self, gradients, is_factored=True):
        if self.is_plain or not is_factored:
            return np.mean(gradients, 0, np.float64)
        whole = [each.reshape(self.rows, -1) + own for each, own in zip(gradients, self.residuals, strict=True)]
        p = np.linalg.qr(np.mean([each @ self.q for each in whole], 0))[0]
        self.q = np.mean([each.T @ p for each in whole], 0)
        reduced = p @ self.q.T
        self.residuals = [each - reduced for each in whole]
        return reduced.reshape(self.shape)


def close(actual, expected):
    tolerance = 1e-2 if actual.dtype == np.float16 else 1e-4
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


class Seen:
    def step(self, grads):
        self.grads = grads


@pytest.mark.parametrize("members", [None, [0, 2]], ids=["all ranks", "a process set"])
@pytest.mark.parametrize(("op", "predivide"), [(rr.Average, 1.0), (rr.Average, 2.0), (rr.Sum, 1.0)])
def test_the_reduced_gradients_are_those_of_a_simulation(op, predivide, members):
    """With rank 3 of 4 ranks on another host; two passes a step; counts, of the integers, as they are."""
    ranks = members or [0, 1, 2, 3]

    def program():
        power, inner = rr.PowerSGD(RANK, start_step=2), Seen()
        options = {"op": op, "gradient_predivide_factor": predivide, "backward_passes_per_step": 2}
        process_set = known(members, 1) if members else rr.global_process_set
        optimizer = rr.DistributedOptimizer(inner, compression=power, process_set=process_set, **options)
        simulated = {name: Simulated(name, len(ranks)) for name in SHAPES}
        results = []
        for step in range(STEPS):
            for factor in (1, 2) if step else (3, 0):
                own = {name: factor * gradient(name, rr.rank(), step) for name in SHAPES}
                kept = {name: each.copy() for name, each in own.items()}
                optimizer.step({**own, "count": np.array([factor], np.int32), "nothing": None})
                if rr.rank() not in ranks:
                    continue
                for name, each in kept.items():
                    np.testing.assert_array_equal(own[name], each, err_msg="the caller's arrays stay")
            if rr.rank() in ranks:
                assert predivide == 2 or inner.grads["count"] == 3 * (len(ranks) if op is rr.Sum else 1)
                for name in SHAPES:
                    mean = simulated[name].mean([3.0 * gradient(name, each, step) for each in ranks], step >= 2)
                    close(inner.grads[name], mean * (len(ranks) if op is rr.Sum else 1))
                results += [inner.grads[name] for name in SHAPES]
        assert sorted(power.residuals) == (["conv", "layer.w", "table"] if rr.rank() in ranks else [])
        return [each.tobytes() for each in results]

    every = run_ranks(4, program, hosts=[0, 0, 0, 1], process_sets=[members] if members else ())
    assert all(every[each] == every[ranks[0]] for each in ranks), "bit-identical"


def trained(power, steps, gradients, start=0):
    """What a NumPy optimizer sees in some steps."""
    inner = Seen()
    optimizer = rr.DistributedOptimizer(inner, compression=power)
    seen = []
    for step in range(start, start + steps):
        optimizer.step({"layer.w": gradients(step)})
        seen.append(inner.grads["layer.w"])
    return seen


def mean_of(low, high):
    return lambda step: np.mean([gradient("layer.w", rank, step) for rank in range(low, high)], 0)


@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
@each_rank_of(3)
def test_what_is_not_finite_on_a_rank_is_on_none_and_leaves_the_residual(bad):
    """3e38: only a sum overflows. In the next step all is as if that one had not been."""
    power, twin = rr.PowerSGD(RANK, 0), rr.PowerSGD(RANK, 0)
    own = mean_of(rr.rank(), rr.rank() + 1)
    trained(power, 2, own), trained(twin, 2, own)

    def spoiled(step):
        grad = own(step)
        grad[3, 4 : 4 + (20 if bad == 3e38 else 1)] = bad if rr.rank() == 1 else 1
        return grad

    (seen,) = trained(power, 1, spoiled)
    assert not np.isfinite(seen).all()
    after, expected = trained(power, 1, own, 2), trained(twin, 1, own, 2)
    np.testing.assert_array_equal(after, expected)
    return after


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@each_rank_of(2)
def test_gradients_of_zeros_and_of_a_lower_rank_come_whole_and_do_not_stay_so(dtype):
    power, column = rr.PowerSGD(RANK, 0), np.arange(20, dtype=dtype)[:, None]
    rank_1 = column * np.linspace(1, 2, 30, dtype=dtype)
    *_, zeros = trained(power, 2, lambda step: 0 * rank_1)
    assert not zeros.any()
    for seen in trained(power, 3, lambda step: rank_1 * (1 + rr.rank())):
        np.testing.assert_allclose(seen, 1.5 * rank_1, rtol=1e-5)
    rank_2 = rank_1 + column**2 * np.linspace(-1, 1, 30, dtype=dtype)
    np.testing.assert_allclose(sum(trained(power, 3, lambda step: rank_2)), 3 * rank_2, rtol=1e-2, atol=1)
    np.testing.assert_allclose(trained(power, 1, lambda step: rank_2)[0], rank_2, rtol=1e-3, atol=0.1)


@each_rank_of(1)
def test_alone_nothing_is_done():
    power = rr.PowerSGD(RANK, 0)
    np.testing.assert_array_equal(trained(power, 1, mean_of(0, 1))[0], gradient("layer.w", 0, 0))
    assert not power.residuals


def test_the_bytes_of_a_gpt_of_width_384_are_under_two_hundredths():
    """Its two blocks, embeddings and head, between two hosts."""
    width = 384
    shapes = [(256, width), (256, width), (256, width), *2 * [(3 * width, width), (width, width)]]
    shapes += 2 * [(4 * width, width), (width, 4 * width), (4 * width,), *5 * [(width,)]]

    def sent(start_step):
        messages = []

        def program():
            optimizer = rr.DistributedOptimizer(Seen(), compression=rr.PowerSGD(4, start_step))
            optimizer.step([np.ones(each, np.float32) for each in shapes])

        run_ranks(2, program, hosts=[0, 1], messages=messages)
        return sum(each.nbytes for each in messages)

    assert sent(0) <= 0.02 * sent(1)
