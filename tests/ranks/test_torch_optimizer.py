"""The torch optimizer on threads: guards, graphs that differ, what a step can begin with anew."""

import pytest
import torch

import ringreduce
import ringreduce.torch as hvd
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.training import batch, loss_of, make_model, ranks_add_up, wrap

SMALL_BUCKETS = Settings(fusion_slot_bytes=128)


def test_gradients_are_reduced_during_backward_in_few_messages():
    def program():
        model = make_model()
        optimizer = wrap(model, groups=1)  # no matter of time
        loss_of(model, batch(hvd.rank())).backward()
        reduced_before_step = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        return reduced_before_step

    messages = []
    first, second = run_ranks(2, program, messages=messages, settings=Settings(algorithm="ring"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    of_gradients = [message for message in messages if message.tag == 1 and message.nbytes > 4]  # not what is agreed on
    assert len(of_gradients) == 4, "four gradients in one ring of two ranks"


def test_graphs_that_differ_per_rank_do_not_hang():
    """Each of four leaves out another layer."""

    def make():
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4))).double()
        for number, parameter in enumerate(model.parameters()):
            parameter.data.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) + number / 8)
        return model

    def backward(model, x, rank, step):
        torch.nn.Sequential(*(layer for number, layer in enumerate(model) if number != rank))(x[:, :2]).sum().backward()

    ranks_add_up(4, backward, make=make, steps=1)


def test_frozen_parameters_and_other_layouts():
    def program():
        model = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        hvd.broadcast_parameters([("bias", model.bias)])
        model.bias.requires_grad_(False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        optimizer = wrap(model)
        x = torch.full((1, 2, 5, 5), 1.0 + hvd.rank()).to(memory_format=torch.channels_last)
        model(x).sum().backward()
        optimizer.step()
        assert model.bias.grad is None
        return model.weight.grad[0, 0, 0, 0].item()

    assert run_ranks(2, program) == [13.5, 13.5]


def test_after_a_mismatch_the_step_can_begin_anew():
    def program():
        model = torch.nn.Linear(3 + hvd.rank(), 2)
        optimizer = wrap(model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 3 + hvd.rank())).sum().backward()
            with pytest.raises(ringreduce.MismatchError, match="all ranks must pass equal shapes"):
                optimizer.step()
            optimizer.zero_grad()
            model(torch.ones(1, 3 + hvd.rank())).sum().backward()
            with pytest.raises(ringreduce.MismatchError, match=r"allreduce 'weight'.*all ranks must pass equal shapes"):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    run_ranks(2, program)
