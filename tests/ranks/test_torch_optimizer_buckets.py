"""Buckets: gradients in one submission each, in an order that ranks agree on; and what a bucket must not change."""

import collections
import itertools

import pytest
import torch

import ringreduce
import ringreduce.torch as hvd
from ringreduce.execution.host import Host
from ringreduce.optim import buckets, exchange, reducer
from ringreduce.testing import run_ranks
from tests.support.training import parameters, same_on_all, share

WIDTHS = (5, 16, 7, 9, 3)
STEPS = 5


@pytest.fixture(params=[True, False], ids=["as they fill", "at the end"], autouse=True)
def overlap(request, monkeypatch):
    """Whether backward submits full buckets; they are small here."""
    monkeypatch.setattr(Host, "overlaps", request.param)
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 100)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1000)


def make_model(widths=WIDTHS):
    generator = torch.Generator().manual_seed(1)
    layers = [torch.nn.Linear(i, o) for i, o in itertools.pairwise(widths)]
    model = torch.nn.Sequential(*layers).double()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
    return model


def loss_of(model, x):
    for layer in model:
        x = torch.tanh(layer(x))
    return x.square().mean()


def wrap(model, prefix="", **options):
    named = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), named, **options)


def bucket_names(optimizer):
    return [[member.name for member in bucket.members] for bucket in optimizer._reducer._buckets]


@pytest.fixture(autouse=True)
def submitted(monkeypatch):
    """By rank, what the optimizer has submitted; cleared at will."""
    submit, found = exchange.submit, collections.defaultdict(list)

    def note(tensors, name, *args, **kwargs):
        found[hvd.rank()].append(name)
        return submit(tensors, name, *args, **kwargs)

    monkeypatch.setattr(exchange, "submit", note)
    return found


def trained(body, wrapping=True, steps=STEPS, **options):
    """body(model, optimizer, step, shares): `shares` are what this process has of the data of all ranks."""
    model = make_model()
    optimizer = wrap(model, **options) if wrapping else torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        body(model, optimizer, step)
        optimizer.step()
    return parameters(model)


def equal_to_alone(size, body, alone, **options):
    """Ranks that do `body` and one process that does `alone` in each step get the same parameters."""
    result = same_on_all(run_ranks(size, lambda: trained(body, **options)))
    torch.testing.assert_close(result, trained(alone, wrapping=False), rtol=1e-9, atol=1e-11)


def shares_of(size, step):
    """What `share(step)` is on each rank."""
    from tests.support.training import batch

    return [batch(step)[rank::size] for rank in range(size)]


@pytest.mark.parametrize("cautious", [0, 8])
@pytest.mark.parametrize("size", [2, 3])
def test_one_submission_a_bucket(size, cautious, monkeypatch, submitted):
    """The order is that of backward: the last layer first."""
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", cautious)

    def program():
        model = make_model()
        optimizer = wrap(model)
        counts = []
        for step in range(STEPS):
            submitted[hvd.rank()].clear()
            optimizer.zero_grad()
            loss_of(model, share(step)).backward()
            optimizer.step()
            counts.append(len(submitted[hvd.rank()]))
        names = bucket_names(optimizer)
        assert sorted(itertools.chain(*names)) == sorted(name for name, _ in model.named_parameters()), "each once"
        assert len(names) < 8
        assert not any(each.is_loose for each in optimizer._reducer._gradients.values())
        assert {name[0] for name in names[0]} == {"3"}
        assert {name[0] for name in names[-1]} == {"0"}
        assert counts[1:] == [len(names)] * (STEPS - 1)
        return parameters(model)

    def alone(model, optimizer, step):
        for x in shares_of(size, step):
            (loss_of(model, x) / size).backward()

    result = same_on_all(run_ranks(size, program))
    torch.testing.assert_close(result, trained(alone, wrapping=False), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 3.0}, {"groups": 2}, {"sparse_as_dense": True}])
def test_with_the_other_options(options, compression):
    def body(model, optimizer, step):
        loss_of(model, share(step)).backward()

    def alone(model, optimizer, step):
        for x in shares_of(3, step):
            (loss_of(model, x) / 3).backward()

    kind = getattr(hvd.Compression, compression)
    result = same_on_all(run_ranks(3, lambda: trained(body, compression=kind, **options)))
    tolerance = 1e-9 if compression == "none" else 1e-2
    torch.testing.assert_close(result, trained(alone, wrapping=False), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("looking", ["not", "at all", "one by one"])
def test_a_rank_that_lacks_gradients_inside_a_bucket(looking):
    """In every other step rank 1 leaves out the third layer; what it lacks is zeros."""

    def without_third(model, x):
        return loss_of([model[0], model[1], lambda hidden: hidden.repeat(1, 2)[:, :9], model[3]], x)

    def body(model, optimizer, step):
        leaves_out = hvd.rank() == 1 and step % 2
        (without_third if leaves_out else loss_of)(model, share(step)).backward()
        if looking == "at all":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        elif looking == "one by one":
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)

    def alone(model, optimizer, step):
        for rank, x in enumerate(shares_of(2, step)):
            ((without_third if rank == 1 and step % 2 else loss_of)(model, x) / 2).backward()
        if looking == "at all":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        elif looking == "one by one":
            for parameter in model.parameters():
                parameter.grad.mul_(0.5)

    equal_to_alone(2, body, alone)


def test_an_order_that_differs_between_ranks():
    """Two halves with a loss each; the ranks agree on an order that is neither's own."""

    def body(model, optimizer, step):
        losses = [loss_of(model[2:], share(step)[:, :1].repeat(1, 7)), loss_of(model[:2], share(step))]
        for loss in losses if hvd.rank() else losses[::-1]:
            loss.backward()

    def program():
        model = make_model()
        optimizer = wrap(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            body(model, optimizer, step)
            optimizer.step()
        return bucket_names(optimizer), parameters(model)

    def alone(model, optimizer, step):
        for x in shares_of(2, step):
            ((loss_of(model[2:], x[:, :1].repeat(1, 7)) + loss_of(model[:2], x)) / 2).backward()

    (first, result), (second, other) = run_ranks(2, program)
    assert first == second
    assert torch.equal(result, other)
    torch.testing.assert_close(result, trained(alone, wrapping=False), rtol=1e-9, atol=1e-11)


def test_parameters_frozen_and_unfrozen_later(submitted):
    """The second layer trains in the first two steps, the third from step 2 on, in a bucket from step 3 on."""

    def freeze(model, step):
        model[1].requires_grad_(step < 2)
        model[2].requires_grad_(step >= 2)

    def body(model, optimizer, step):
        freeze(model, step)
        submitted[hvd.rank()].clear()
        loss_of(model, share(step)).backward()
        if step == STEPS - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            assert len(submitted[hvd.rank()]) < 6, "parameters that train"

    def alone(model, optimizer, step):
        freeze(model, step)
        for x in shares_of(2, step):
            (loss_of(model, x) / 2).backward()

    equal_to_alone(2, body, alone)


def test_a_sparse_gradient_in_between():
    def program():
        table = torch.nn.Embedding(6, 5, sparse=True).double()
        table.weight.data = torch.arange(30.0, dtype=torch.float64).reshape(6, 5) / 30
        model = make_model()
        both = torch.nn.ModuleList([model[:2], table, model[2:]])
        optimizer = wrap(both)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, table(torch.tensor([hvd.rank(), 4]))).backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
            assert table.weight.grad.coalesce().indices().tolist() == [[0, 1, 4]]
        assert ["1.weight"] in bucket_names(optimizer)
        assert max(map(len, bucket_names(optimizer))) > 1
        return parameters(both)

    same_on_all(run_ranks(2, program))


@pytest.mark.parametrize("who", [[0, 1], [0]])
def test_a_look_between_two_backwards(who, monkeypatch):
    """The gradients that the second backward is going to compute must not be sent as zeros."""
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", 8)

    def body(model, optimizer, step):
        loss_of(model[2:], share(step)[:, :1].repeat(1, 7)).backward()
        if hvd.rank() in who and step > 1:
            assert model[3].weight.grad.abs().sum() > 0
        loss_of(model[:2], share(step)).backward()

    def alone(model, optimizer, step):
        for x in shares_of(2, step):
            ((loss_of(model[2:], x[:, :1].repeat(1, 7)) + loss_of(model[:2], x)) / 2).backward()

    equal_to_alone(2, body, alone)


def test_a_sum_that_is_looked_at_is_not_summed_twice():
    """Rank 0's first loss is looked at by all; then a backward adds to a part of the same bucket."""

    def body(model, optimizer, step):
        (loss_of(model[:2], share(step)) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model[:2].parameters(), 0.01)
        (loss_of(model[2:], share(step)[:, :1].repeat(1, 7)) / 2).backward()

    def alone(model, optimizer, step):
        for x in shares_of(2, step):
            (loss_of(model[:2], x) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model[:2].parameters(), 0.01)
        for x in shares_of(2, step):
            (loss_of(model[2:], x[:, :1].repeat(1, 7)) / 2).backward()

    equal_to_alone(2, body, alone, op=hvd.Sum)


@pytest.mark.parametrize("passes", [[2, 2], [1, 2]])
def test_accumulated(passes):
    """passes: by rank, in the third step; two are declared."""

    def parts(x, rank, step):
        return [x[2 * number : 2 * number + 2] for number in range(passes[rank] if step == 2 else 2)]

    def body(model, optimizer, step):
        for x in parts(share(step), hvd.rank(), step):
            loss_of(model, x).backward()

    def alone(model, optimizer, step):
        for rank, whole in enumerate(shares_of(2, step)):
            for x in parts(whole, rank, step):
                (loss_of(model, x) / 2).backward()

    equal_to_alone(2, body, alone, backward_passes_per_step=2)


def test_what_lacks_a_backward_is_not_sent_when_another_gradient_is_complete():
    def losses(model, x):
        """The second computes half of the model for the second and last time, the third the other half."""
        return loss_of(model, x), loss_of(model[2:], x[:, :1].repeat(1, 7)), loss_of(model[:2], x)

    def body(model, optimizer, step):
        for loss in losses(model, share(step)):
            loss.backward()

    def alone(model, optimizer, step):
        for x in shares_of(2, step):
            (sum(losses(model, x)) / 2).backward()

    equal_to_alone(2, body, alone, backward_passes_per_step=2)


def test_two_optimizers_of_one_backward():
    def program():
        models = make_model(), make_model(WIDTHS[::-1])
        optimizers = [wrap(model, prefix) for model, prefix in zip(models, "ab", strict=True)]
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            hidden = torch.tanh(models[0](share(step)))
            (loss_of(models[1], hidden) + hidden.mean()).backward()
            for optimizer in optimizers if hvd.rank() else optimizers[::-1] if step > 1 else optimizers:
                optimizer.step()
        assert all(len(bucket_names(optimizer)) < 8 for optimizer in optimizers)
        return torch.cat([parameters(model) for model in models])

    same_on_all(run_ranks(2, program))


def test_worlds_of_other_sizes_and_a_join():
    """One optimizer in worlds of 1, 3 and 2 ranks: the buckets are agreed on anew."""
    states = {}

    def program():
        model, optimizer = states.setdefault(hvd.rank(), None) or (make_model(), None)
        optimizer = optimizer or wrap(model)
        states[hvd.rank()] = model, optimizer
        hvd.broadcast_parameters(model.state_dict())
        for epoch in range(2):
            for step in range(3 if hvd.rank() else 2 - epoch):
                optimizer.zero_grad()
                loss_of(model, share(step)).backward()
                optimizer.step()
            hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
        optimizer.zero_grad()
        loss_of(model, share(7)).backward()
        optimizer.step()
        return parameters(model)

    for size in (1, 3, 2):
        same_on_all(run_ranks(size, program))


def test_a_mismatch_inside_a_bucket_names_the_tensor():
    def program():
        model = make_model()
        optimizer = wrap(model)
        for step in range(3):
            if step == 2:
                rows = 7 + hvd.rank()
                model[1].bias.data, model[1].weight.data = torch.zeros(rows), torch.zeros(rows, 16)
                model[2].weight.data = torch.zeros(9, rows)
                model.double()
            optimizer.zero_grad()
            loss_of(model, share(step)).backward()
            if step == 2:
                with pytest.raises(
                    ringreduce.MismatchError, match=r"allreduce '[12]\.(weight|bias)' .*: float64\[.*equal shapes"
                ):
                    optimizer.step()
            else:
                optimizer.step()

    run_ranks(2, program)
