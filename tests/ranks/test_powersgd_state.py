"""The state of PowerSGD: saved, committed, after a join; what it refuses; and training with it."""

import copy
import pickle
import re
from unittest.mock import Mock

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from ringreduce.testing import run_ranks
from tests.ranks.test_powersgd import RANK, Seen, gradient, mean_of, trained
from tests.support.on_threads import each_rank_of


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
        "PowerSGD: the state is of rank=2, this of rank=4; make it equal",
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
