"""PowerSGD: equal to a plain simulation of all ranks, whatever travels together; its state, and what it refuses."""

import copy
import pickle
import re
import zlib
from unittest.mock import Mock

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
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


# Its state


def test_a_state_saved_by_four_ranks_is_loaded_by_two():
    """Equal to going on with four, as the mean residual is the same: here each of two has the mean of two gradients."""

    def four():
        power = rr.PowerSGD(RANK, 1)
        trained(power, 3, mean_of(rr.rank(), rr.rank() + 1))
        state = copy.deepcopy(power.state_dict())
        return state, trained(power, 2, mean_of(rr.rank(), rr.rank() + 1), 3)

    def two():
        power = rr.PowerSGD(RANK, 1)
        power.load_state_dict(kept)
        return trained(power, 2, mean_of(2 * rr.rank(), 2 * rr.rank() + 2), 3)

    states, expected = zip(*run_ranks(4, four), strict=True)
    for state in states:
        np.testing.assert_equal(state, states[0])
    kept = states[0]
    for seen in run_ranks(2, two):
        np.testing.assert_allclose(seen, expected[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@each_rank_of(2)
def test_a_copy_of_an_optimizer_goes_on_by_itself(copied):
    optimizer = rr.DistributedOptimizer(Seen(), compression=rr.PowerSGD(RANK, 0))
    optimizer.step({"layer.w": gradient("layer.w", rr.rank(), 0)})
    other = copied(optimizer)
    for step in (1, 2):
        for each in (optimizer, other):
            each.step({"layer.w": gradient("layer.w", rr.rank(), step)})
        np.testing.assert_array_equal(optimizer.grads["layer.w"], other.grads["layer.w"])


REFUSED = {
    "rank": (lambda: rr.PowerSGD(0), "PowerSGD: rank=0; expected a whole number of 1 or more"),
    "half a rank": (lambda: rr.PowerSGD(1.5), "PowerSGD: rank=1.5; expected a whole number"),
    "start_step": (lambda: rr.PowerSGD(4, -1), "PowerSGD: start_step=-1; expected a whole number of 0 or more"),
    "class": (
        lambda: rr.DistributedOptimizer(Seen(), compression=rr.PowerSGD),
        r"int4, PowerSGD\(…\) for an optimizer",
    ),
    "op": (
        lambda: rr.DistributedOptimizer(Seen(), compression=rr.PowerSGD(), op=rr.Max),
        r"compression=PowerSGD\(rank=4, start_step=100\) with op=Max; it works with Average and Sum only",
    ),
    "function": (
        lambda: rr.allreduce(np.ones(3), compression=rr.PowerSGD()),
        "keeps what it has not sent for the next step, so it is for DistributedOptimizer only",
    ),
    "GPU": (
        lambda: rr.PowerSGD()._is_factored("w", Mock(element=TABLE["float32"], shape=(20, 30), device="cuda:1")),
        "gradient 'w' is on cuda:1, but PowerSGD works in host memory; on GPUs use DDP",
    ),
    "other rank": (
        lambda: rr.PowerSGD(4).load_state_dict({"rank": 2}),
        "PowerSGD: the loaded state has rank=2; expected 4: pass the same rank=",
    ),
    "other shape": (
        lambda: trained(of_other_model("layer.w", (12, 30)), 1, mean_of(0, 1)),
        "gradient 'layer.w' has 20 x 30 elements, but its state 12 x 30: that is another model's",
    ),
    "other name": (
        lambda: trained(of_other_model("layer.v", (20, 30)), 1, mean_of(0, 1)),
        "gradient 'layer.w' is not in the loaded state, which has 'layer.v' and 0 more; load this model's",
    ),
}


def of_other_model(name, shape, **options):
    power = rr.PowerSGD(RANK)
    parts = {"q": {name: np.ones((RANK, shape[1]))}, "residuals": {name: np.ones(shape)}}
    power.load_state_dict({"rank": RANK, "steps": {name: 9}, **parts}, **options)
    return power


@pytest.mark.parametrize("case", REFUSED)
@each_rank_of(2)
def test_what_is_refused(case):
    wrong, message = REFUSED[case]
    with pytest.raises(rr.InputError, match=message):
        wrong()
    trained(of_other_model("layer.v", (20, 30), strict=False), 1, mean_of(0, 1))


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("other", ["PowerSGD(rank=3, start_step={0})", "PowerSGD(rank=2, start_step=1)", None])
@each_rank_of(2)
def test_ranks_that_differ_are_told_both(start, other):
    """With start 0 the factors are of other shapes, too."""
    power, other = rr.PowerSGD(RANK, start), other and other.format(start)
    if rr.rank() == 1:
        power = eval(f"rr.{other}") if other else rr.Compression.none
    message = f"compressor={other}, but rank 0 has compressor=PowerSGD(rank=2, start_step={start}) "
    with pytest.raises(rr.MismatchError, match=re.escape(message)[: -len("\\ ")]):
        trained(power, 1, mean_of(0, 1))


def test_after_a_join_ranks_have_alike_what_they_share():
    """Rank 1 of 3 joins two steps early, in one of which the others begin to send factors."""

    def program():
        power, own = rr.PowerSGD(RANK, 3), mean_of(rr.rank(), rr.rank() + 1)
        early = 2 * (rr.rank() == 1)
        trained(power, 4 - early, own)
        rr.join()
        seen = trained(power, 2, own, 4)
        assert power.shared["layer.w"].steps == 6
        return seen

    every = run_ranks(3, program, hosts=[0, 0, 1])
    for seen in every:
        np.testing.assert_array_equal(seen, every[0])


@each_rank_of(2, process_sets=[[0]])
def test_a_join_of_another_process_set_needs_no_agreement():
    power, own = rr.PowerSGD(RANK, 0), mean_of(rr.rank(), rr.rank() + 1)
    trained(power, 2, own)
    if rr.rank() == 0:
        rr.join(process_set=known([0], 1))
    trained(power, 2, own, 2)
