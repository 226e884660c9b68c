"""What of local steps is saved and restored, alone and in elastic states; GradScaler, closures, new parameters."""

import copy

import numpy as np
import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support.local_models import MODELS, trained
from tests.support.local_steps import FRAGMENTS, Simulated, assert_close, gradient, simulated, start
from tests.support.on_threads import each_rank_of

WAY = {"sync_every": 4, "momentum": 0.9, "lr": 0.7}


def states_of(model, made):
    """The elastic state of a model."""
    if model == "torch":
        return hvd.elastic.TorchState(optimizer=made.optimizer, params=made.params, step=0)
    return rr.elastic.ObjectState(optimizer=made.optimizer, params=made.params, step=0)


@pytest.mark.parametrize("model", MODELS)
@each_rank_of(2)
def test_a_state_dict_leads_to_the_anchors_and_goes_on_as_it_went_on_from_there(model):
    """After step 6 rank 0 saves its own; all load it, as a job does that begins anew."""
    made = trained(model, 6, **WAY)
    saved = rr.broadcast_object(copy.deepcopy(made.optimizer.state_dict()))
    results = []
    for other in (made, trained(model, 3, **WAY)):
        other.optimizer.load_state_dict(copy.deepcopy(saved))
        assert_close(other.values(), simulated(2, 6, **WAY)[1])
        for step in range(7, 14):
            other.step(step)
        results.append(other.values())
    assert_close(*results)
    with other.optimizer.averaged():
        return np.concatenate([each.reshape(-1) for each in other.values().values()])


@pytest.mark.parametrize("model", MODELS)
def test_after_a_loss_all_ranks_begin_from_the_anchors_of_the_last_commit(elastic, model):
    """A fragment that was on its way is given up. Then it is as if training had begun there."""

    def program():
        made = MODELS[model](lambda *both: rr.DiLoCo(*both, sync_every=6, fragments=2, delay=2))
        state, failures, seen = states_of(model, made), [7], []

        @rr.elastic.run
        def train(state):
            seen.append(made.values())
            while state.step < 11:
                state.step += 1
                made.step(state.step)
                if state.step == 7:
                    state.commit()  # one fragment is on its way
                if state.step in failures:
                    failures.remove(state.step)
                    raise rr.PeerLostError("rank 9 died", [9])
            return made.values()

        return train(state), seen

    expected = Simulated(range(2), start(), gradient, FRAGMENTS[2], sync_every=6, delay=2)
    for _ in range(7):
        expected.step()
    expected.begin(range(2))
    anchors = expected.anchors.copy()
    for _ in range(4):
        expected.step()
    for rank, (own, (_, *begun)) in enumerate(run_ranks(2, program)):
        for each in begun:
            assert_close(each, anchors)
        assert_close(own, expected.own[rank])
    assert elastic == [[2, 2]]


@pytest.mark.parametrize("model", MODELS)
def test_a_rank_that_comes_begins_from_the_anchors_and_so_do_the_others(model):
    """One had trained alone for six steps."""
    [before] = run_ranks(1, lambda: trained(model, 6, **WAY))

    def program():
        made = before if rr.rank() == 0 else trained(model, 0, **WAY)
        states_of(model, made).sync()
        came = made.values()
        for step in range(7, 12):
            made.step(step)
        with made.optimizer.averaged():
            return came, made.values()

    (one, averaged), (other, same) = run_ranks(2, program)
    for each in (one, other):
        assert_close(each, simulated(1, 6, **WAY)[1])
    np.testing.assert_equal(averaged, same)


@each_rank_of(2)
def test_a_step_that_grad_scaler_skips_on_one_rank_counts():
    """The others would wait for it. Closures, and gradients that are missing here, too."""
    weight, unused = (torch.nn.Parameter(torch.full((2,), value)) for value in (1.0, 5.0))
    optimizer = hvd.LocalSGD(torch.optim.SGD([weight, unused], lr=0.5), sync_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    is_skipped = rr.rank() == 1
    for infinite in (False, is_skipped):
        optimizer.zero_grad()
        loss = weight.sum() * (float("inf") if infinite else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 100.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert weight.tolist() == [0.25, 0.25], "the mean of 0.0 and 0.5"
    assert scaler.get_scale() == (4.0 if is_skipped else 8.0)
    for _ in range(2):
        optimizer.zero_grad()
        assert optimizer.step(lambda: (weight * 2).sum().backward() or 7.0) == 7.0
    assert weight.tolist() == [0.25 - 2.0, 0.25 - 2.0]
    assert unused.tolist() == [5.0, 5.0]


@each_rank_of(2)
def test_parameters_that_are_added_or_begin_to_train_travel_from_then_on():
    first, late, added = (torch.nn.Parameter(torch.zeros(3)) for _ in range(3))
    late.requires_grad_(False)
    optimizer = hvd.DiLoCo(torch.optim.SGD([first, late], lr=1.0), sync_every=2)
    seen = []
    for step in range(1, 7):
        if step == 4:
            late.requires_grad_(True)
            optimizer.add_param_group({"params": [added]})
        for each in (first, late, added):
            each.grad = torch.full((3,), -1.0 - rr.rank()) if each.requires_grad else None
        optimizer.step()
        seen.append([each[0].item() for each in (first, late, added)])
    assert seen[1::2] == [[3.0, 0.0, 0.0], [6.0, 1.5, 1.5], [9.0, 4.5, 4.5]]


@each_rank_of(2)
def test_what_is_no_state_of_these_parameters_is_refused_and_a_copy_is_the_user_s_optimizer():
    optimizer = trained("torch", 4, **WAY).optimizer
    saved = optimizer.state_dict()
    saved["state"]["local steps"]["anchors"]["a"] = torch.zeros(7)
    with pytest.raises(rr.InputError, match=r"a state of another model: 'a' is \[7\] in it, and has \[3, 4\]"):
        optimizer.load_state_dict(saved)
    saved["state"]["local steps"]["anchors"] = {"x": torch.zeros(7)}
    with pytest.raises(
        rr.InputError, match=r"a state of another model: 'x' is \[7\] in it, and is not a parameter here"
    ):
        optimizer.load_state_dict(saved)
    sharded = hvd.ShardedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], lr=0.1))
    with pytest.raises(
        rr.InputError, match=r"DiLoCo: each rank has only its part of a ShardedOptimizer, .* the original one"
    ):
        rr.DiLoCo(sharded, sync_every=4)
    of_numpy = trained("numpy", 5, **WAY)
    for each in (optimizer, of_numpy.optimizer):
        with pytest.raises(rr.InputError, match="LocalSGD: the optimizer already takes local steps"):
            rr.LocalSGD(each, sync_every=4)
        with pytest.raises(rr.InputError, match="DistributedOptimizer: the optimizer is already wrapped"):
            rr.DistributedOptimizer(each)
    copied, before = copy.deepcopy(of_numpy), of_numpy.values()
    copied.optimizer.begin_from_anchors()
    assert_close(of_numpy.values(), before)
    assert_close(copied.values(), simulated(2, 5, **WAY)[1])
    if rr.rank() == 0:  # warnings are caught for all threads
        with pytest.warns(UserWarning, match="this SGD is a copy"):
            copied = copy.deepcopy(optimizer)
        assert type(copied) is torch.optim.SGD


@each_rank_of(3)
def test_parameters_in_16_bits_have_anchors_in_32():
    """The mean of 1, 1 and 1 + 2^-7 is rounded once, where it is written."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = hvd.LocalSGD(torch.optim.SGD([weight], lr=1.0), sync_every=1)
    weight.grad = torch.full_like(weight, -(2.0**-7) if rr.rank() == 2 else 0.0)
    optimizer.step()
    [anchor] = optimizer.state_dict()["state"]["local steps"]["anchors"].values()
    torch.testing.assert_close(anchor, torch.full((4,), 1 + 2.0**-7 / 3))
    assert weight.tolist() == [1.0] * 4
    with optimizer.averaged():
        assert weight.tolist() == [1.0] * 4
