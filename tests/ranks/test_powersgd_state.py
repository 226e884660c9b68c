"""The state of PowerSGD: saved, committed, after a join; what it refuses; and training with it."""

import copy
import pickle
import re
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.arrays.dtypes import TABLE
from ringreduce.testing import run_ranks
from tests.ranks.on_threads import each_rank_of
from tests.ranks.test_powersgd import RANK, Seen, gradient, mean_of, trained
from tests.support.reference import data


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
    "class": (lambda: rr.DistributedOptimizer(Seen(), compression=rr.PowerSGD), r"int4, PowerSGD\(…\), or a class"),
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
        "gradient 'w' is on cuda:1, but this works in host memory; on GPUs take DDP",
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
        "gradient 'layer.w' is not in the state that was loaded, of 'layer.v' and 0 more; load this model's",
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


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12))

    def loss(self, step, rank):
        inputs = torch.from_numpy(data("float32", 5 * 16, rank, step)).view(5, 16)
        return (self.layers(inputs) - inputs[:, :12].sin()).square().mean()


def of_torch(start_step=2):
    """A model whose optimizer sends factors."""
    model = copy.deepcopy(MODEL)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    power = hvd.PowerSGD(RANK, start_step)
    return model, power, hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=power)


MODEL = Model()


def flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters()]).numpy()


def test_training_goes_on_from_a_commit_as_the_first_time(elastic):
    """To the last bit: each rank's residuals are committed, too; the step that fails is done by some ranks."""

    def program(fails):
        model, power, optimizer = of_torch()
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        failures = [hvd.PeerLostError("rank 9 died", [9])] if fails else []

        @hvd.elastic.run
        def training(state):
            while state.step < 8:
                model.loss(state.step, hvd.rank()).backward()
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                if state.step % 2 == 0:
                    state.commit()
                elif failures and state.step == 5:
                    raise failures.pop()
            return flat(model), power.residuals["layers.0.weight"]

        return training(state)

    for one, other in zip(run_ranks(3, lambda: program(True)), run_ranks(3, lambda: program(False)), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])
    assert elastic == [[3] * 3]


def test_a_rank_that_comes_new_has_what_all_share_and_a_residual_of_zeros():
    trainers = {}  # by rank

    def program(steps):
        if hvd.rank() not in trainers:
            trainers[hvd.rank()] = of_torch(0)
        model, power, optimizer = trainers[hvd.rank()]
        state = hvd.elastic.TorchState(model, optimizer)
        state.sync()
        assert (power.residuals == {}) == (hvd.rank() == 2 or steps == range(3))
        assert steps == range(3) or power.shared["layers.0.weight"].steps == 3
        for step in steps:
            model.loss(step, hvd.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return flat(model)

    run_ranks(2, lambda: program(range(3)))
    every = run_ranks(3, lambda: program(range(3, 5)))
    for each in every:
        np.testing.assert_array_equal(each, every[0])


@each_rank_of(2)
def test_gradscaler_skips_a_step_on_all_ranks_where_one_has_an_infinity():
    model, power, optimizer = of_torch(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        before, residual = flat(model), copy.deepcopy(power.residuals)
        loss = model.loss(step, hvd.rank())
        scaler.scale(loss * (torch.inf if step == 2 and hvd.rank() == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert np.array_equal(before, flat(model)) == (step == 2)
        if step == 2:
            np.testing.assert_equal(power.residuals, residual)
    assert scaler.get_scale() == 4.0
    return flat(model)


def test_it_trains_as_full_precision():
    def program(start_step):
        model, _, optimizer = of_torch(start_step)
        for step in range(120):
            model.loss(step % 20, hvd.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return np.mean([model.loss(step, rank).item() for step in range(20) for rank in range(2)])

    with_factors, full = (run_ranks(2, lambda start=start: program(start))[0] for start in (0, 1000))
    untrained = np.mean([MODEL.loss(step, rank).item() for step in range(20) for rank in range(2)])
    assert full < 0.02 * untrained
    assert with_factors < full + 0.005 * untrained
