"""How people train: clipping, GradScaler, accumulation, several losses, graphs that differ; against one process."""

import contextlib
import functools
import os
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import ringreduce
import ringreduce.torch as hvd
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.torch import gradient
from tests.support import training
from tests.support.on_threads import each_rank_of, known


def clipped(model, optimizer, data, step):
    """Without a ritual."""
    training.loss_of(model, data(step)).backward()
    assert training.clip(model) > 0.5
    optimizer.step()


def clipped_by_value(model, optimizer, data, step, foreach=True):
    training.loss_of(model, data(step)).backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.3, foreach=foreach)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
    optimizer.step()


def clipped_one_by_one(model, optimizer, data, step):
    clipped_by_value(model, optimizer, data, step, foreach=False)


def horovods_ritual(model, optimizer, data, step):
    training.loss_of(model, data(step)).backward()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
        training.clip(model)
        with optimizer.skip_synchronize(), warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
    else:
        training.clip(model)
        optimizer.step()


def losses_with_a_backward_each(model, optimizer, data, step):
    """Actor and critic in one optimizer: each part is clipped after its own backward."""
    hidden = model[0](data(step)).detach()
    model[2](hidden).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model[2].parameters(), 0.1)
    model[0](data(step)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)
    optimizer.step()


def losses_in_another_order_on_each_rank(model, optimizer, data, step):
    losses = [model[2](model[0](data(step)).detach()).square().mean(), model[0](data(step)).square().mean()]
    for loss in losses if hvd.is_initialized() and hvd.rank() else losses[::-1]:
        loss.backward()
    optimizer.step()


def a_look_after_each_of_two_backwards_over_everything(model, optimizer, data, step):
    """The parts that the first backward left out are looked at, reduced as zeros, and reduced again."""
    for loss in (model[2](model[0](data(step)).detach()), model[0](data(step))):
        loss.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def no_sync_then_step(model, optimizer, data, step):
    """Which reduces what there is."""
    with optimizer.no_sync() if hasattr(optimizer, "no_sync") else contextlib.nullcontext():
        training.loss_of(model, data(step)).backward()
    optimizer.step()


def frozen_and_unfrozen(model, optimizer, data, step):
    """The last layer is frozen at first, the other at last; weight decay would show gradients that are zeros."""
    model[0].requires_grad_(step != 3)
    model[2].requires_grad_(step > 1)
    training.loss_of(model, data(step)).backward()
    training.clip(model)
    optimizer.step()


def checkpoints(model, optimizer, data, step, reentrant=True):
    """A backward inside backward."""
    hidden = torch.utils.checkpoint.checkpoint(model[0], data(step).requires_grad_(), use_reentrant=reentrant)
    out = torch.utils.checkpoint.checkpoint(model[2], model[1](hidden), use_reentrant=reentrant)
    out.square().mean().backward()
    training.clip(model)
    optimizer.step()


def checkpoints_that_are_not_reentrant(model, optimizer, data, step):
    checkpoints(model, optimizer, data, step, reentrant=False)


def gradients_of_gradients(model, optimizer, data, step):
    """A penalty on the gradient: .grad has a graph of its own."""
    x = data(step).requires_grad_()
    (slope,) = torch.autograd.grad((model(x) ** 2).sum(), x, create_graph=True)
    (slope.square().sum(1).mean() / 100).backward()
    optimizer.step()


LOOPS = [
    *((clipped, size) for size in (1, 2, 3, 4)),
    (clipped_by_value, 2),
    (clipped_one_by_one, 2),
    (horovods_ritual, 2),
    (losses_with_a_backward_each, 2),
    (losses_with_a_backward_each, 3),
    (losses_in_another_order_on_each_rank, 2),
    (a_look_after_each_of_two_backwards_over_everything, 2),
    (no_sync_then_step, 2),
    (frozen_and_unfrozen, 2),
    (checkpoints, 3),
    (checkpoints_that_are_not_reentrant, 3),
    (gradients_of_gradients, 2),
]


@pytest.mark.parametrize(("loop", "size"), LOOPS, ids=lambda each: getattr(each, "__name__", str(each)))
def test_ranks_train_as_one_process(loop, size):
    def program(data, wrapped):
        model = training.make_model()
        model[2].requires_grad_(loop is not frozen_and_unfrozen)
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), model)
        for step in range(4):
            optimizer.zero_grad()
            loop(model, optimizer, data, step)
        return training.parameters(model)

    training.trains_as_one_process(size, program)


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, functools.partial(torch.optim.Adam, fused=True)], ids=["SGD", "fused"]
)
@pytest.mark.parametrize(
    ("unscaling", "wire"),
    [(False, hvd.Compression.none), (True, hvd.Compression.none), (True, hvd.Compression.int8.everywhere)],
)
@each_rank_of(2)
def test_grad_scaler_skips_the_same_steps_on_all_ranks(unscaling, wire, kind):
    """One rank's gradient is not finite in step 1: no rank makes that step, and no ritual is needed."""
    model = training.make_model().float()
    optimizer = hvd.DistributedOptimizer(kind(model.parameters(), lr=0.01), compression=wire)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, scale in enumerate([8, 4, 4, 4]):
        optimizer.zero_grad()
        loss = training.loss_of(model, training.share(step).float())
        if step == 1 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if unscaling:
            scaler.unscale_(optimizer)
            training.clip(model)
        before = training.parameters(model).clone()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert torch.equal(before, training.parameters(model)) == (step == 1)
    assert torch.isfinite(training.parameters(model)).all()
    return training.parameters(model)


@pytest.mark.parametrize("clipping", [False, True])
def test_backward_does_not_wait_and_other_collectives_may_come_before_step(clipping):
    """Both average a number between backward() and step()."""

    def before_step(model):
        assert not hvd.is_initialized() or hvd.allreduce(torch.tensor(hvd.rank() + 0.0), name="metric") == 0.5
        if clipping:
            training.clip(model)

    training.ranks_add_up(2, training.backward_that_lacks_a_layer, before_step)


@pytest.mark.parametrize("groups", [1, 2, 3, 100, "lists"])
def test_groups(groups):
    """The first layer's gradients come last; rank 1 has none of the other's bias: what a group lacks is zeros."""

    def backward(model, x, rank, step):
        hidden = model[1](model[0](x))
        out = model[2](hidden) if rank == 0 else hidden @ model[2].weight.T
        out.square().mean().backward()

    def wrapping(model):
        lists = [[model[0].weight, model[2].bias], [model[2].weight]]
        return training.wrap(model, groups=lists if groups == "lists" else groups)

    training.ranks_add_up(2, backward, training.clip, wrapping=wrapping)


def test_no_sync_only_adds():
    def program():
        model, optimizer = training.wrapped()

        def backward(model, step):
            first, second = training.share(step).chunk(2)
            with optimizer.no_sync():
                training.loss_of(model, first).backward()
                own = model[0].weight.grad.clone()
            training.loss_of(model, second).backward()
            assert not torch.equal(*hvd.allgather(own[None], name="own"))

        return training.trained(model, optimizer, 4, backward, training.clip)

    def both(model, x, rank, step):
        for half in x.chunk(2):
            training.loss_of(model, half).backward()

    training.close(training.same_on_all(run_ranks(2, program)), training.alone(range(2), 2, both, training.clip))


def test_the_models_zero_grad_begins_a_count_anew():
    """As in a GAN: the generator's loss gives the discriminator gradients that nobody wants."""

    def program(data, wrapped):
        model = training.make_model()
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(2):
            training.loss_of(model, data(7)).backward()
            model.zero_grad()
            for half in data(step).chunk(2):
                training.loss_of(model, half).backward()
            optimizer.step()
            optimizer.zero_grad()
        return training.parameters(model)

    training.trains_as_one_process(2, program, backward_passes_per_step=2)


@each_rank_of(2)
def test_a_gradient_of_no_rank_is_zeros():
    model, optimizer = training.wrapped()
    for _ in range(2):
        optimizer.zero_grad()
        model[0](training.share(0)).sum().backward()
        assert model[2].weight.grad.abs().sum() == 0
        optimizer.step()
        assert model[2].bias.grad.abs().sum() == 0


def test_a_process_set():
    """Ranks 0 and 2 train together, rank 1 alone."""

    def program():
        model = training.make_model()
        return training.trained(model, training.wrap(model, process_set=known([0, 2], 1)), 4, before_step=training.clip)

    results = run_ranks(3, program, process_sets=[[0, 2]])
    assert torch.equal(results[0], results[2])
    training.close(results[0], training.alone([0, 2], 3, before_step=training.clip))
    training.close(results[1], training.alone([1], 3, before_step=training.clip))


@pytest.mark.parametrize("wrapper", [hvd.DistributedOptimizer, hvd.ShardedOptimizer])
def test_a_process_set_that_is_gone_is_told_where_ranks_would_train_alone(wrapper):
    def program():
        some, model = hvd.add_process_set([0, 2]), training.make_model()
        optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=some)
        training.trained(model, optimizer, 1)
        hvd.remove_process_set(some)
        with pytest.raises(ValueError, match=r"ranks=\[0, 2\]\) was not added, or was removed"):
            training.trained(model, optimizer, 1)
        with pytest.raises(ValueError, match="there is no process set 5"):  # as after another init()
            wrapper(torch.optim.SGD(model.parameters(), lr=0.1), process_set=known([0, 2], 5))

    run_ranks(3, program, settings=Settings(dynamic_process_sets=True))


@pytest.mark.parametrize("steps", [[3, 1], [0, 3], [2, 3]])
def test_join_when_data_do_not_come_out_even(steps):
    """steps: by rank. A joined rank gives zeros; an Average is still of both."""

    def backward(model, x, rank, step):
        if step < steps[rank]:
            training.loss_of(model, x).backward()

    def program():
        model, rank = training.make_model(), hvd.rank()
        training.trained(
            model,
            training.wrap(model),
            steps[rank],
            lambda model, step: backward(model, training.share(step), rank, step),
            training.clip,
        )
        ringreduce.join()
        return training.parameters(model)

    training.close(run_ranks(2, program)[steps.index(3)], training.alone(range(2), 2, backward, training.clip, steps=3))


USES = [
    lambda grad: grad.numpy(),
    lambda grad: torch.stack([grad, grad])[0],
    lambda grad: grad.data.mul_(1.0),
    lambda grad: torch.from_dlpack(grad),
    lambda grad: torch.add(input=grad, other=0.0),
    lambda grad: torch.tensor(grad.tolist(), dtype=torch.float64),
    lambda grad: hvd.allreduce(grad, name="again"),
    lambda grad: grad + 0.0,
]


@each_rank_of(2)
def test_a_gradient_can_be_used_in_every_way_before_step():
    model, alone = training.make_model(), training.make_model()
    optimizer = training.wrap(model)
    training.loss_of(alone, training.batch(0)).backward()
    found = []
    for use in USES:
        optimizer.zero_grad()
        training.own_backward(model, 0)
        grad = model[0].weight.grad
        assert grad.shape == (16, 5)
        assert isinstance(grad, torch.Tensor)
        found.append(torch.as_tensor(use(grad)).clone())
        training.close(found[-1], alone[0].weight.grad)
        assert type(model[0].weight.grad) is torch.Tensor
        assert torch.equal(grad, model[0].weight.grad), "who holds it sees the same"
        optimizer.synchronize()
    return torch.stack(found)


class Twice(torch.optim.SGD):
    """Looks at the loss twice before it steps."""

    def step(self, closure):
        with torch.enable_grad():
            closure()
            closure()
        return super().step()


def test_a_closure_that_leaves_out_other_parameters_each_time():
    def program():
        model = training.make_model()
        optimizer = hvd.DistributedOptimizer(Twice(model.parameters(), lr=0.1), model.named_parameters())
        calls = []

        def closure():
            calls.append(None)
            model.zero_grad()
            training.backward_that_lacks_a_layer(model, training.share(0), (hvd.rank() + len(calls)) % 2, 0)

        optimizer.step(closure)
        assert len(calls) == 2
        return training.parameters(model)

    training.close(
        training.same_on_all(run_ranks(2, program)),
        training.alone(range(2), 2, training.backward_that_lacks_a_layer, steps=1),
    )


@each_rank_of(2)
def test_the_line_that_is_told_is_that_of_each_backward():
    model = torch.nn.Linear(2 + hvd.rank(), 1, bias=False)
    optimizer = training.wrap(model, sparse_as_dense=True)
    here = sys._getframe().f_lineno
    for step in range(2):
        loss = model(torch.ones(1, 2 + hvd.rank())).sum()
        if step:
            loss.backward()
        else:
            loss.backward()
        line = rf"{os.path.basename(__file__)}:{here + (4 if step else 6)}"
        with pytest.raises(ringreduce.MismatchError, match=rf"\({line}\): float32.* has float32.* \({line}\)"):
            optimizer.step()


@pytest.mark.parametrize(
    "options", [{}, {"backward_passes_per_step": 2}, {"op": hvd.Sum}, {"is_sharded": True}], ids=str
)
def test_gradients_that_autograd_leaves_conjugated(options):
    """Such a view's memory holds other values; a real gradient beside it may be a negated one."""
    sharded, options = "is_sharded" in options, {key: each for key, each in options.items() if key != "is_sharded"}
    passes, scale = options.get("backward_passes_per_step", 1), 1 if "op" in options else 2

    alone = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    (alone.conj() * 1j).real.sum().backward()
    assert alone.grad.is_conj()

    def program():
        parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)), torch.nn.Parameter(torch.ones(4))]
        made = torch.optim.SGD(parameters, lr=1.0)
        optimizer = hvd.ShardedOptimizer(made) if sharded else hvd.DistributedOptimizer(made, **options)
        own = torch.arange(3) * (1 + 2j) * (1 + hvd.rank())
        for _ in range(2):
            for _ in range(passes):
                loss = (parameters[0].conj() * own).real.sum()
                loss = loss + torch.complex(torch.zeros(4), parameters[1] * (1 + hvd.rank())).conj().imag.sum()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [each.detach().numpy() for each in parameters]

    step = 2 * passes * 3 / scale
    for complexes, reals in run_ranks(2, program):
        np.testing.assert_allclose(complexes, 1 - step * np.arange(3) * (1 + 2j))
        np.testing.assert_allclose(reals, np.full(4, 1 + step))


def test_a_rank_without_a_batch_does_not_hold_up_one_that_clips_one_layer():
    """It asks for the layouts of all gradients, and goes on with those that have come."""

    def program():
        first, last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        for each in (first, last):
            hvd.broadcast_parameters(each.state_dict())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            if hvd.rank() == 0:
                last(first(torch.ones(2, 3))).sum().backward()
                torch.nn.utils.clip_grad_norm_(last.parameters(), 1e9)
            optimizer.step()
        return [each.detach().numpy() for each in (*first.parameters(), *last.parameters())]

    one, other = run_ranks(2, program, timeout_s=20)
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_graph_of_a_gradient_that_is_lost_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(gradient.JOB, "warning", told.append)
    gradient._warn_of_graph.cache_clear()

    def program():
        parameter = torch.nn.Parameter(torch.ones(2) + hvd.rank())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (parameter**3).sum().backward(create_graph=True)
        optimizer.step()
        return parameter.tolist()

    assert run_ranks(2, program) == [[-6.5, -6.5], [-5.5, -5.5]]
    assert {each.partition(";")[0] for each in told} == {"gradients come from backward(create_graph=True)"}
