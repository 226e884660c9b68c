"""How people train: clipping, GradScaler, accumulation, several losses, graphs that differ; against one process."""

import os
import sys
import warnings

import pytest
import torch
import torch.utils.checkpoint

import ringreduce
import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support.training import batch, gradients, loss_of, make_model, parameters, same_on_all, share, wrap


def close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)


def trained(data, wrapping, body, steps=4, **options):
    model = make_model()
    optimizer = wrap(model, **options) if wrapping else torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        body(model, optimizer, data, step)
    return parameters(model)


def clip(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_clipping_without_a_ritual(size):
    def body(model, optimizer, data, step):
        loss_of(model, data(step)).backward()
        assert clip(model) > 0.5
        optimizer.step()

    close(same_on_all(run_ranks(size, lambda: trained(share, True, body))), trained(batch, False, body))


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_by_value_and_with_foreach(foreach):
    def body(model, optimizer, data, step):
        loss_of(model, data(step)).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.3, foreach=foreach)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
        optimizer.step()

    close(same_on_all(run_ranks(2, lambda: trained(share, True, body))), trained(batch, False, body))


def test_horovods_ritual():
    def body(model, optimizer, data, step):
        loss_of(model, data(step)).backward()
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
            clip(model)
            with optimizer.skip_synchronize(), warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.step()
        else:
            clip(model)
            optimizer.step()

    close(same_on_all(run_ranks(2, lambda: trained(share, True, body, op=hvd.Average))), trained(batch, False, body))


def test_a_sum_is_not_summed_again_by_step():
    def body(model, optimizer, data, step):
        (loss_of(model, data(step)) / (2 if hasattr(optimizer, "synchronize") else 1)).backward()
        clip(model)
        optimizer.step()

    close(same_on_all(run_ranks(2, lambda: trained(share, True, body, op=hvd.Sum))), trained(batch, False, body))


@pytest.mark.parametrize("unscaling", [False, True])
def test_grad_scaler_skips_the_same_steps_on_all_ranks(unscaling):
    """One rank's gradient is not finite in step 1: no rank makes that step, and no ritual is needed."""

    def program():
        model = make_model().float()
        optimizer = wrap(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scales, norms = [], []
        for step in range(4):
            optimizer.zero_grad()
            loss = loss_of(model, share(step).float())
            if step == 1 and hvd.rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if unscaling:
                scaler.unscale_(optimizer)
                norms.append(clip(model))
            before = parameters(model).clone()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            assert torch.equal(before, parameters(model)) == (step == 1)
        return torch.cat([parameters(model), torch.tensor(scales)])

    result = same_on_all(run_ranks(2, program))
    assert result[-4:].tolist() == [8, 4, 4, 4]
    assert torch.isfinite(result).all()


def test_grad_scaler_with_a_fused_optimizer():
    def program():
        model = make_model().float()
        optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01, fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, share(step).float())).backward()
            scaler.step(optimizer)
            scaler.update()
        return parameters(model)

    same_on_all(run_ranks(2, program))


@pytest.mark.parametrize("clipping", [False, True])
def test_backward_does_not_wait_and_other_collectives_may_come_before_step(clipping):
    """Rank 1 computes no gradient of the last layer; both average a number between backward() and step()."""

    def program():
        model = make_model()
        optimizer = wrap(model)
        for step in range(3):
            optimizer.zero_grad()
            hidden = model[0](share(step))
            (model[2](hidden) if hvd.rank() == 0 else hidden).square().mean().backward()
            assert hvd.allreduce(torch.tensor(hvd.rank() + 0.0), name="metric") == 0.5
            if clipping:
                clip(model)
            optimizer.step()
        return parameters(model)

    def alone():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for rank in range(2):
                hidden = model[0](batch(step)[rank::2])
                ((model[2](hidden) if rank == 0 else hidden).square().mean() / 2).backward()
            if clipping:
                clip(model)
            optimizer.step()
        return parameters(model)

    close(same_on_all(run_ranks(2, program)), alone())


@pytest.mark.parametrize("size", [2, 3])
def test_losses_with_a_backward_each(size):
    """Actor and critic in one optimizer: each part is clipped after its own backward."""

    def body(model, optimizer, data, step):
        hidden = model[0](data(step)).detach()
        model[2](hidden).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model[2].parameters(), 0.1)
        model[0](data(step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)
        optimizer.step()

    close(same_on_all(run_ranks(size, lambda: trained(share, True, body))), trained(batch, False, body))


def test_losses_in_another_order_on_each_rank():
    def body(model, optimizer, data, step):
        losses = [model[2](model[0](data(step)).detach()).square().mean(), model[0](data(step)).square().mean()]
        for loss in losses if hvd.is_initialized() and hvd.rank() else losses[::-1]:
            loss.backward()
        optimizer.step()

    close(same_on_all(run_ranks(2, lambda: trained(share, True, body))), trained(batch, False, body))


def test_a_look_after_each_of_two_backwards_over_everything():
    """The parts that the first backward left out are looked at, reduced as zeros, and reduced again."""

    def body(model, optimizer, data, step):
        for loss in (model[2](model[0](data(step)).detach()), model[0](data(step))):
            loss.square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    close(same_on_all(run_ranks(2, lambda: trained(share, True, body))), trained(batch, False, body))


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_compression(compression):
    def program():
        model = make_model().float()
        optimizer = wrap(model, compression=getattr(ringreduce.compression.Compression, compression))
        loss_of(model, share(0).float()).backward()
        optimizer.synchronize()
        return gradients(model)

    result = same_on_all(run_ranks(2, program))
    model = make_model().float()
    loss_of(model, batch(0).float()).backward()
    tolerance = {"none": 1e-5, "fp16": 2e-3, "bf16": 2e-2}[compression]
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, gradients(model), rtol=tolerance, atol=tolerance)
    assert (compression == "none") == torch.allclose(result, gradients(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [0, 2])
def test_predivide(groups):
    def body(model, optimizer, data, step):
        loss_of(model, data(step)).backward()
        optimizer.step()

    def program():
        return trained(share, True, body, gradient_predivide_factor=3.0, groups=groups)

    close(same_on_all(run_ranks(3, program)), trained(batch, False, body))


@pytest.mark.parametrize("groups", [1, 2, 3, 100, "lists"])
def test_groups(groups):
    """The first layer's gradients come last; rank 1 has none of the other's bias: what a group lacks is zeros."""

    def program():
        model = make_model()
        lists = [[model[0].weight, model[2].bias], [model[2].weight]]
        optimizer = wrap(model, groups=lists if groups == "lists" else groups)
        for step in range(3):
            optimizer.zero_grad()
            hidden = model[1](model[0](share(step)))
            out = model[2](hidden) if hvd.rank() == 0 else hidden @ model[2].weight.T
            out.square().mean().backward()
            clip(model)
            optimizer.step()
        return parameters(model)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            hidden = model[1](model[0](batch(step)[rank::2]))
            out = model[2](hidden) if rank == 0 else hidden @ model[2].weight.T
            (out.square().mean() / 2).backward()
        clip(model)
        optimizer.step()
    close(same_on_all(run_ranks(2, program)), parameters(model))


def micro(data, step, number):
    return data(step)[number * 2 : number * 2 + 2]


def micro_of(rank, step, number):
    """What `micro(share, …)` is on that rank of two."""
    return batch(step)[rank::2][number * 2 : number * 2 + 2]


@pytest.mark.parametrize("passes", [[2, 2], [2, 1], [1, 2], [0, 2]])
def test_a_short_accumulation_and_ranks_that_do_not_do_the_same(passes):
    """passes: by rank, in the second step; two are declared."""

    def program():
        model = make_model()
        optimizer = wrap(model, backward_passes_per_step=2)
        for step in range(3):
            optimizer.zero_grad()
            for number in range(passes[hvd.rank()] if step == 1 else 2):
                loss_of(model, micro(share, step, number)).backward()
            optimizer.step()
        return parameters(model)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            for number in range(passes[rank] if step == 1 else 2):
                (loss_of(model, micro_of(rank, step, number)) / 2).backward()
        optimizer.step()
    close(same_on_all(run_ranks(2, program)), parameters(model))


def test_no_sync_only_adds():
    def program():
        model = make_model()
        optimizer = wrap(model)
        for step in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss_of(model, micro(share, step, 0)).backward()
                own = model[0].weight.grad.clone()
            loss_of(model, micro(share, step, 1)).backward()
            clip(model)
            optimizer.step()
            assert not torch.equal(*hvd.allgather(own[None], name="own"))
        return parameters(model)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            for number in range(2):
                (loss_of(model, micro_of(rank, step, number)) / 2).backward()
        clip(model)
        optimizer.step()
    close(same_on_all(run_ranks(2, program)), parameters(model))


def test_no_sync_then_step_reduces_what_there_is():
    def body(model, optimizer, data, step):
        with optimizer.no_sync():
            loss_of(model, data(step)).backward()
        optimizer.step()

    def alone(model, optimizer, data, step):
        loss_of(model, data(step)).backward()
        optimizer.step()

    close(same_on_all(run_ranks(2, lambda: trained(share, True, body))), trained(batch, False, alone))


def test_the_models_zero_grad_begins_a_count_anew():
    """As in a GAN: the generator's loss gives the discriminator gradients that nobody wants."""

    def program():
        model = make_model()
        optimizer = wrap(model, backward_passes_per_step=2)
        for step in range(2):
            loss_of(model, share(7)).backward()
            model.zero_grad()
            for number in range(2):
                loss_of(model, micro(share, step, number)).backward()
            same_on_all(hvd.allgather(model[0].weight.grad[None], name="look"))
            optimizer.step()
            optimizer.zero_grad()
        return parameters(model)

    same_on_all(run_ranks(2, program))


def test_a_gradient_of_no_rank_is_zeros():
    def program():
        model = make_model()
        optimizer = wrap(model)
        for _ in range(2):
            optimizer.zero_grad()
            model[0](share(0)).sum().backward()
            assert model[2].weight.grad.abs().sum() == 0
            optimizer.step()
            assert model[2].bias.grad.abs().sum() == 0

    run_ranks(2, program)


def test_frozen_and_unfrozen_while_training():
    def program(data, wrapping):
        model = make_model()
        model[2].requires_grad_(False)
        kind = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(kind, model.named_parameters()) if wrapping else kind
        for step in range(4):
            model[0].requires_grad_(step != 3)
            model[2].requires_grad_(step > 1)
            optimizer.zero_grad()
            loss_of(model, data(step)).backward()
            clip(model)
            optimizer.step()
        return parameters(model)

    close(same_on_all(run_ranks(2, lambda: program(share, True))), program(batch, False))


def test_a_process_set():
    """Ranks 0 and 2 train together, rank 1 alone."""

    def program():
        members = hvd.ProcessSet([0, 2])
        members.process_set_id = 1
        model = make_model()
        optimizer = wrap(model, process_set=members)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(step)[hvd.rank() :: 3]).backward()
            clip(model)
            optimizer.step()
        return parameters(model)

    def alone(ranks):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                (loss_of(model, batch(step)[rank::3]) / len(ranks)).backward()
            clip(model)
            optimizer.step()
        return parameters(model)

    results = run_ranks(3, program, process_sets=[[0, 2]])
    assert torch.equal(results[0], results[2])
    close(results[0], alone([0, 2]))
    close(results[1], alone([1]))


@pytest.mark.parametrize("steps", [[3, 1], [0, 3], [2, 3]])
def test_join_when_data_do_not_come_out_even(steps):
    """steps: by rank. A joined rank gives zeros; an Average is still of both."""

    def program():
        model = make_model()
        optimizer = wrap(model)
        for step in range(steps[hvd.rank()]):
            optimizer.zero_grad()
            loss_of(model, share(step)).backward()
            clip(model)
            optimizer.step()
        ringreduce.join()
        return parameters(model)

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            if step < steps[rank]:
                (loss_of(model, batch(step)[rank::2]) / 2).backward()
        clip(model)
        optimizer.step()
    close(run_ranks(2, program)[steps.index(3)], parameters(model))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints(reentrant):
    """A backward inside backward."""

    def body(model, optimizer, data, step):
        x = data(step).requires_grad_()
        hidden = torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=reentrant)
        torch.utils.checkpoint.checkpoint(
            model[2], model[1](hidden), use_reentrant=reentrant
        ).square().mean().backward()
        clip(model)
        optimizer.step()

    close(same_on_all(run_ranks(3, lambda: trained(share, True, body))), trained(batch, False, body))


def test_a_gradient_can_be_used_in_every_way_before_step():
    def program():
        model = make_model()
        optimizer = wrap(model)
        uses = [
            lambda grad: grad.numpy(),
            lambda grad: torch.stack([grad, grad])[0],
            lambda grad: grad.data.mul_(1.0),
            lambda grad: torch.from_dlpack(grad),
            lambda grad: torch.add(input=grad, other=0.0),
            lambda grad: torch.tensor(grad.tolist(), dtype=torch.float64),
            lambda grad: hvd.allreduce(grad, name="again"),
            lambda grad: grad + 0.0,
        ]
        found = []
        for use in uses:
            optimizer.zero_grad()
            loss_of(model, share(0)).backward()
            grad = model[0].weight.grad
            assert grad.shape == (16, 5)
            assert isinstance(grad, torch.Tensor)
            found.append(torch.as_tensor(use(grad)).clone())
            assert type(model[0].weight.grad) is torch.Tensor
            assert torch.equal(grad, model[0].weight.grad), "who holds it sees the same"
            optimizer.synchronize()
        return torch.stack(found)

    model = make_model()
    loss_of(model, batch(0)).backward()
    for found in same_on_all(run_ranks(2, program)):
        close(found, model[0].weight.grad)


class Twice(torch.optim.SGD):
    """Looks at the loss twice before it steps."""

    def step(self, closure):
        with torch.enable_grad():
            closure()
            closure()
        return super().step()


def test_a_closure_that_leaves_out_other_parameters_each_time():
    def program():
        model = make_model()
        optimizer = hvd.DistributedOptimizer(Twice(model.parameters(), lr=0.1), model.named_parameters())
        calls = []

        def closure():
            calls.append(None)
            model.zero_grad()
            hidden = model[0](share(0))
            (model[2](hidden) if hvd.rank() == len(calls) % 2 else hidden).square().mean().backward()

        optimizer.step(closure)
        assert len(calls) == 2
        return parameters(model)

    model = make_model()
    for rank in range(2):
        hidden = model[0](batch(0)[rank::2])
        ((model[2](hidden) if rank == 0 else hidden).square().mean() / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    close(same_on_all(run_ranks(2, program)), parameters(model))


def test_a_rank_that_joins_before_its_first_step_asks_later_what_is_sparse_and_not_alone():
    def program():
        model = make_model()
        optimizer = wrap(model)
        for epoch in range(3):
            for step in range(2 if epoch or hvd.rank() else 0):  # rank 0 has nothing in the first epoch
                optimizer.zero_grad()
                loss_of(model, share(step)).backward()
                optimizer.step()
            last = hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        return parameters(model)

    same_on_all(run_ranks(3, program))


def test_the_line_that_is_told_is_that_of_each_backward():
    def program():
        model = torch.nn.Linear(2 + hvd.rank(), 1, bias=False)
        optimizer = wrap(model, sparse_as_dense=True)
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

    run_ranks(2, program)
