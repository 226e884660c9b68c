"""The torch optimizer on threads: guards, graphs that differ, what a step can begin with anew."""

import pytest
import torch

import ringreduce
import ringreduce.torch as hvd
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of
from tests.support.training import batch, loss_of, make_model, wrap


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


@each_rank_of(2)
def test_frozen_parameters_and_other_layouts():
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
    assert model.weight.grad[0, 0, 0, 0].item() == 13.5


@each_rank_of(2)
def test_after_a_mismatch_the_step_can_begin_anew():
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
