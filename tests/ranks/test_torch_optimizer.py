"""The torch optimizer on threads: guards, graphs that differ, what a step can begin with anew."""

import pytest
import torch

import ringreduce
import ringreduce.torch as hvd
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.training import batch, loss_of, make_model, parameters, wrap

SMALL_BUCKETS = Settings(fusion_slot_bytes=128)


def test_gradients_are_reduced_during_backward_in_few_messages():
    def program():
        model = make_model()
        optimizer = wrap(model, groups=1, sparse_as_dense=True)  # nothing to agree on, and no matter of time
        loss_of(model, batch(hvd.rank())).backward()
        reduced_before_step = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        return reduced_before_step

    messages = []
    first, second = run_ranks(2, program, messages=messages, settings=Settings(algorithm="ring"))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len([message for message in messages if message.tag == 1]) == 4, "four gradients in one ring of two ranks"


def test_graphs_that_differ_per_rank_do_not_hang():
    def program():
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(4)])
        hvd.broadcast_parameters(model.state_dict())
        optimizer = wrap(model)
        x = torch.ones(1, 2)
        for k in range(4):
            if k != hvd.rank():
                x = model[k](x)
        x.sum().backward()
        optimizer.step()
        return parameters(model)

    results = run_ranks(4, program, settings=SMALL_BUCKETS)
    assert all(torch.equal(result, results[0]) for result in results)


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


def fails(call, kind, message):
    def program():
        with pytest.raises(kind, match=message):
            call(make_model())

    run_ranks(1, program)


def test_wrong_arguments():
    fails(
        lambda m: hvd.DistributedOptimizer(torch.optim.SGD(m.parameters()), [("a", p) for p in m.parameters()]),
        ValueError,
        "names must differ; given more than once: a$",
    )
    fails(
        lambda m: hvd.DistributedOptimizer(torch.optim.SGD(m.parameters()), list(m.named_parameters())[:1]),
        ValueError,
        "3 of the optimizer's 4 parameters have no name in it",
    )
    fails(
        lambda m: hvd.DistributedOptimizer(torch.optim.SGD(m.parameters()), m.parameters()),
        ValueError,
        r"expected \(name, parameter\) pairs, such as model.named_parameters\(\)",
    )
    fails(lambda m: wrap(m, backward_passes_per_step=0), ValueError, "backward_passes_per_step=0; expected 1 or more")


def test_more_backwards_than_declared():
    def call(model):
        optimizer = wrap(model)  # noqa: F841 - its hooks go with it
        loss_of(model, batch(0)).backward()
        loss_of(model, batch(1)).backward()

    fails(call, AssertionError, "was computed 2 times since the last step.*but backward_passes_per_step is 1")


def test_zero_grad_between_backward_and_step():
    def call(model):
        optimizer = wrap(model)
        loss_of(model, batch(0)).backward()
        optimizer.zero_grad()

    fails(
        call,
        AssertionError,
        r"zero_grad\(\) after backward\(\) and before step\(\).*call synchronize\(\) first, on all ranks",
    )


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


def test_zero_grad_sets_to_none_or_to_zero():
    def program():
        model = make_model()
        optimizer = wrap(model)
        loss_of(model, batch(0)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert model[0].weight.grad.abs().sum() == 0
        optimizer.zero_grad()
        assert model[0].weight.grad is None

    run_ranks(1, program)
