"""PowerSGD in torch's optimizers: buckets, elastic commits, GradScaler, and training with it."""

import copy
import io

import numpy as np
import pytest
import torch

import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.ranks.optim.test_powersgd import RANK, SHAPES, STEPS, TYPES, Simulated, close, gradient
from tests.support.on_threads import each_rank_of
from tests.support.reference import data

MODEL = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.Tanh(), torch.nn.Linear(24, 12))


def loss_of(model, step, rank):
    inputs = torch.from_numpy(data("float32", 5 * 16, rank, step)).view(5, 16)
    return (model(inputs) - inputs[:, :12].sin()).square().mean()


@pytest.mark.parametrize("groups", [0, 3])
@each_rank_of(3)
def test_a_residual_is_its_gradients_whatever_that_travels_with(groups):
    """The first step has each gradient alone, the next buckets; then one rank begins one alone, and all split.

    With groups, ranks wait for another one first: each goes on while nobody waits for it.
    """
    shapes = [name for name in SHAPES if groups or name not in TYPES]  # else in one bucket
    dtypes = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
    zeros = [torch.zeros(SHAPES[name], dtype=dtypes[TYPES.get(name, "float32")]) for name in shapes]
    named = [(name, torch.nn.Parameter(each)) for name, each in zip(shapes, zeros, strict=True)]
    simulated = {name: Simulated(name, 3) for name in shapes}
    power = hvd.PowerSGD(RANK, 0)
    sgd = torch.optim.SGD([each for _, each in named], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, named, compression=power, groups=groups)
    for step in range(STEPS):
        grads = {name: torch.from_numpy(gradient(name, hvd.rank(), step)) for name in shapes}
        losses = [(parameter * grads[name]).sum() for name, parameter in named]
        if step == 3 and hvd.rank() == 1 and not groups:
            losses.pop().backward()
            named[-1][1].grad.sum()
        sum(losses).backward()
        if groups:
            named[2 * (hvd.rank() % 2)][1].grad.sum()
        optimizer.step()
        for name, parameter in named:
            close(parameter.grad.numpy(), simulated[name].mean([gradient(name, each, step) for each in range(3)]))
        optimizer.zero_grad()
    torch.save(power.state_dict(), file := io.BytesIO())
    file.seek(0)
    power.load_state_dict(torch.load(file, weights_only=True))
    assert isinstance(power.state_dict()["q"]["layer.w"], torch.Tensor)
    return torch.cat([each.detach().flatten() for _, each in named]).numpy()


def of_torch(start_step=2):
    """A model whose optimizer sends factors."""
    model = copy.deepcopy(MODEL)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    power = hvd.PowerSGD(RANK, start_step)
    return model, power, hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=power)


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
                loss_of(model, state.step, hvd.rank()).backward()
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                if state.step % 2 == 0:
                    state.commit()
                elif failures and state.step == 5:
                    raise failures.pop()
            return flat(model), power.residuals["0.weight"]

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
        assert steps == range(3) or power.shared["0.weight"].steps == 3
        for step in steps:
            loss_of(model, step, hvd.rank()).backward()
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
        loss = loss_of(model, step, hvd.rank())
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
            loss_of(model, step % 20, hvd.rank()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return np.mean([loss_of(model, step, rank).item() for step in range(20) for rank in range(2)])

    with_factors, full = (run_ranks(2, lambda start=start: program(start))[0] for start in (0, 1000))
    untrained = np.mean([loss_of(MODEL, step, rank).item() for step in range(20) for rank in range(2)])
    assert full < 0.02 * untrained
    assert with_factors < full + 0.005 * untrained
