"""op=Adasum: every rank steps by its own gradients, and the changes are reduced."""

import functools
import math

import pytest
import torch

import ringreduce.torch as hvd
from ringreduce.collectives.ops import Adasum
from ringreduce.testing import run_ranks
from tests.support import matrix
from tests.support.on_threads import each_rank_of, known
from tests.support.training import batch, loss_of, make_model, parameters, same_on_all, trained, wrap, wrapped


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("size", [2, 4])
def test_the_changes_of_a_step_are_reduced(size, kind):
    def program():
        model = make_model()
        named = [*model.named_parameters()][:: -1 if hvd.rank() == 1 else 1]  # the order may differ
        optimizer = hvd.DistributedOptimizer(kind([each for _, each in named], lr=0.01), named, op=Adasum)
        assert isinstance(optimizer, kind)
        return trained(model, optimizer, 3)

    models = [make_model() for _ in range(size)]
    optimizers = [kind(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        starts = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank in range(size):
            optimizers[rank].zero_grad()
            loss_of(models[rank], batch(step)[rank::size]).backward()
            optimizers[rank].step()
        for start, *ranks in zip(starts, *(model.parameters() for model in models), strict=True):
            stepped = start + torch.from_numpy(matrix.adasum([(each.detach() - start).numpy() for each in ranks]))
            for each in ranks:
                each.data = stepped.clone()
    torch.testing.assert_close(same_on_all(run_ranks(size, program)), parameters(models[0]), rtol=1e-9, atol=1e-10)


def test_on_one_rank_it_is_the_users_step():
    def program(**options):
        model, optimizer = wrapped(**options)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        return parameters(model)

    assert torch.equal(run_ranks(1, lambda: program(op=Adasum))[0], run_ranks(1, program)[0])


@pytest.mark.parametrize("name", ["0.bias", "2.weight"])
def test_a_parameter_that_one_rank_alone_freezes_fails_on_all(name):
    def program():
        model, optimizer = wrapped(op=Adasum)
        model[0].weight.requires_grad_(False)
        trained(model, optimizer, 2)
        if hvd.rank() == 1:
            model.get_parameter(name).requires_grad_(False)
        with pytest.raises(hvd.MismatchError, match=f"2 tensors without '{name}', but rank 0 has 3"):
            trained(model, optimizer, 1)

    run_ranks(2, program)


def test_a_rank_without_gradients_changes_nothing():
    def program():
        model, optimizer = wrapped(op=Adasum)
        if hvd.rank() == 0:
            loss_of(model, batch(0)).backward()
        optimizer.step()
        return parameters(model)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    torch.testing.assert_close(same_on_all(run_ranks(2, program)), parameters(model))


class Unscaling(torch.optim.SGD):
    """It does what GradScaler leaves to such a class."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"] if not self.found_inf.item() else ():
            parameter -= 0.1 * parameter.grad / (1 if self.grad_scale is None else self.grad_scale)


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, functools.partial(torch.optim.SGD, fused=True), Unscaling], ids=["SGD", "fused", "own"]
)
@pytest.mark.parametrize("unscales", [False, True])
def test_a_rank_whose_gradients_are_infinite_skips_its_part_of_the_step(unscales, kind):
    """GradScaler would leave out step() on this rank alone, and the others would wait for it."""

    def program(ranks, infinite=None):
        model = make_model()
        optimizer = kind(model.parameters(), lr=0.1)
        if ranks > 1:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=Adasum)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step)) * (math.inf if infinite == (hvd.rank(), step) else 1)
            scaler.scale(loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return parameters(model), scaler.get_scale()

    alone = run_ranks(1, lambda: program(1))[0][0]
    (first, scale), (second, smaller) = run_ranks(2, lambda: program(2, infinite=(1, 0)))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone)
    assert (scale, smaller) == (64.0, 32.0)


@each_rank_of(2, process_sets=[[1]])
def test_calls_that_adasum_refuses():
    model, optimizer = wrapped(op=Adasum, backward_passes_per_step=2)
    loss_of(model, batch(0)).backward()
    loss_of(model, batch(0)).backward()
    with optimizer.no_sync():
        loss_of(model, batch(0)).backward()
    with pytest.raises(AssertionError, match=r"was computed 3 times .* backward_passes_per_step is 2"):
        loss_of(model, batch(0)).backward()
    with pytest.raises(AssertionError, match=r"skip_synchronize\(\) with op=Adasum"):
        optimizer.skip_synchronize()
    optimizer.synchronize()
    optimizer.step()
    with pytest.raises(ValueError, match=r"gradient_predivide_factor=2.0 with op=.*works with op=Average only"):
        wrap(model, op=Adasum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="op=Adasum works with all ranks only"):
        wrap(model, op=Adasum, process_set=known([1], 1))


@each_rank_of(3)
def test_three_ranks():
    with pytest.raises(ValueError, match="op=Adasum: 3 ranks; expected a power of two"):
        wrap(make_model(), op=Adasum)
