"""The torch optimizer on threads: training equals a single process on all data; guards; graphs that differ."""

import pytest
import torch

import ringreduce
import ringreduce.torch as hvd
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.training import batch, loss_of, make_model, parameters, wrap

SMALL_BUCKETS = Settings(fusion_slot_bytes=128)
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def trained_alone(make_optimizer, steps=6):
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_on_shares_equals_training_on_everything(size, name):
    def program():
        model = make_model(seed=hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), model.named_parameters())
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, batch(step)[hvd.rank() :: size]).backward()
            optimizer.step()
        return parameters(model)

    expected = trained_alone(OPTIMIZERS[name])
    results = run_ranks(size, program, settings=SMALL_BUCKETS)
    torch.testing.assert_close(results[0], expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(result, results[0]) for result in results), "bit-identical"


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


def test_accumulation_sums_and_a_short_last_one_is_reduced_by_step():
    def program():
        model, alone = make_model(), make_model()
        optimizer = wrap(model, backward_passes_per_step=3)
        for passes in (3, 2):
            optimizer.zero_grad()
            alone.zero_grad()
            for number in range(passes):
                loss_of(model, batch(10 * hvd.rank() + number)).backward()
                for rank in range(2):
                    (loss_of(alone, batch(10 * rank + number)) / 2).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad)
                optimizer.step()
            alone.load_state_dict(model.state_dict())

    run_ranks(2, program, settings=SMALL_BUCKETS)


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


def test_it_is_still_the_users_optimizer():
    def program():
        model = make_model()
        inner = torch.optim.Adam(model.parameters(), lr=0.1)
        before = torch.optim.lr_scheduler.StepLR(inner, 1)
        optimizer = hvd.DistributedOptimizer(inner)
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        loss_of(model, batch(hvd.rank())).backward()
        optimizer.step()
        inner._opt_called = True  # the early scheduler watches the inner optimizer's step
        before.step()
        after.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        return parameters(model)

    one, two = run_ranks(2, program)
    assert torch.equal(one, two)


def test_a_closure_is_reduced_every_time_it_is_called():
    def program():
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters(), max_iter=4), model.named_parameters()
        )

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, batch(0)[hvd.rank() :: 2])
            loss.backward()
            return loss.detach() * 0 + hvd.allreduce(loss.detach())

        optimizer.step(closure)
        return parameters(model)

    one, two = run_ranks(2, program)
    assert torch.equal(one, two)


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


def test_zero_grad_begins_an_unfinished_accumulation_anew():
    def program():
        model = make_model()
        optimizer = wrap(model, backward_passes_per_step=2)
        for passes in (1, 2):
            optimizer.zero_grad()
            for _ in range(passes):
                loss_of(model, batch(0)).backward()
        optimizer.step()

    run_ranks(1, program)


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


def test_step_after_synchronize_warns_and_does_not_reduce_twice():
    def program():
        model = make_model()
        optimizer = wrap(model, op=hvd.Sum)
        loss_of(model, batch(0)).backward()
        optimizer.synchronize()
        reduced = model[0].weight.grad.clone()
        with pytest.warns(
            UserWarning, match=r"has reduced the gradients; put it into .with optimizer.skip_synchronize\(\)"
        ):
            optimizer.step()
        assert torch.equal(model[0].weight.grad, reduced)

    run_ranks(1, program)


def test_the_general_name_takes_torch_optimizers():
    def program():
        model = make_model()
        optimizer = ringreduce.DistributedOptimizer(torch.optim.SGD(model.parameters()), op=ringreduce.Sum)
        loss_of(model, batch(0)).backward()
        return hasattr(optimizer, "skip_synchronize"), model[2].bias.grad[0].item()

    (one,) = run_ranks(1, program)
    two = run_ranks(2, program)
    assert two == [(True, pytest.approx(2 * one[1]))] * 2
