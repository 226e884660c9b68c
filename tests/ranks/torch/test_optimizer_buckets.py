"""Buckets: gradients in one submission each, in an order that ranks agree on; and what a bucket must not change."""

import collections
import functools
import itertools
import operator

import numpy as np
import pytest
import torch

import ringreduce
import ringreduce.torch as hvd
from ringreduce.execution.host import HostResources
from ringreduce.optim import buckets, exchange, reducer
from ringreduce.testing import run_ranks
from tests.support import training
from tests.support.on_threads import each_rank_of

WIDTHS = (5, 16, 7, 9, 3)
STEPS = 5


@pytest.fixture(params=[True, False], ids=["as they fill", "at the end"], autouse=True)
def overlap(request, monkeypatch):
    """Whether backward submits full buckets; they are small here."""
    monkeypatch.setattr(HostResources, "overlaps", request.param)
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


def halves(model, x):
    """A loss of the last two layers and one of the first two."""
    return loss_of(model[2:], x[:, :1].repeat(1, 7)), loss_of(model[:2], x)


def backward_of(model, x, *_):
    loss_of(model, x).backward()


def own_backward(model, step):
    backward_of(model, training.share(step))


def clip(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def halve(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


add_up = functools.partial(training.ranks_add_up, make=make_model, steps=STEPS)
by_one_process = functools.partial(training.alone, make=make_model, steps=STEPS)


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


@pytest.mark.parametrize("cautious", [0, 8])
@pytest.mark.parametrize("size", [2, 3])
def test_one_submission_a_bucket(size, cautious, monkeypatch, submitted):
    """The order is that of backward: the last layer first."""
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", cautious)

    def program():
        model, counts = make_model(), []
        optimizer = training.wrap(model)

        def backward(model, step):
            counts.append(len(submitted[hvd.rank()]))
            own_backward(model, step)

        training.trained(model, optimizer, STEPS, backward)
        counts.append(len(submitted[hvd.rank()]))
        names = bucket_names(optimizer)
        assert sorted(itertools.chain(*names)) == sorted(name for name, _ in model.named_parameters()), "each once"
        assert len(names) < 8
        assert not any(each.is_loose for each in optimizer._reducer._gradients.values())
        assert {name[0] for name in names[0]} == {"3"}
        assert {name[0] for name in names[-1]} == {"0"}
        assert np.diff(counts)[1:].tolist() == [len(names)] * (STEPS - 1)
        return training.parameters(model)

    training.close(training.same_on_all(run_ranks(size, program)), by_one_process(range(size), size, backward_of))


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "int8.everywhere"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_predivide_factor": 3.0},
        {"groups": 2, "gradient_predivide_factor": 3.0},
        {"sparse_as_dense": True},
    ],
)
def test_with_the_other_options(options, compression):
    def program():
        model = make_model()
        optimizer = training.wrap(model, compression=operator.attrgetter(compression)(hvd.Compression), **options)
        return training.trained(model, optimizer, STEPS, own_backward)

    result, expected = training.same_on_all(run_ranks(3, program)), by_one_process(range(3), 3, backward_of)
    tolerance = {"none": 1e-9, "fp16": 1e-2}.get(compression, 5e-2)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert torch.allclose(result, expected, rtol=1e-9, atol=1e-9) == (compression == "none")


@pytest.mark.parametrize("look", [lambda model: None, clip, halve], ids=["not", "at all", "one by one"])
def test_a_rank_that_lacks_gradients_inside_a_bucket(look):
    """In every other step rank 1 leaves out the third layer; what it lacks is zeros."""

    def backward(model, x, rank, step):
        lacking = [model[0], model[1], lambda hidden: hidden.repeat(1, 2)[:, :9], model[3]]
        loss_of(lacking if rank == 1 and step % 2 else model, x).backward()

    add_up(2, backward, look)


def test_an_order_that_differs_between_ranks():
    """Two halves with a loss each; the ranks agree on an order that is neither's own."""

    def backward(model, x, rank, step):
        for loss in halves(model, x)[:: 1 if rank else -1]:
            loss.backward()

    def program():
        model = make_model()
        optimizer = training.wrap(model)
        training.trained(
            model, optimizer, STEPS, lambda model, step: backward(model, training.share(step), hvd.rank(), step)
        )
        return bucket_names(optimizer), training.parameters(model)

    (first, result), (second, other) = run_ranks(2, program)
    assert first == second
    assert torch.equal(result, other)
    training.close(result, by_one_process(range(2), 2, backward))


def test_parameters_frozen_and_unfrozen_later(submitted):
    """The second layer trains in the first two steps, the third from step 2 on, in a bucket from step 3 on."""

    def backward(model, x, rank, step):
        model[1].requires_grad_(step < 2)
        model[2].requires_grad_(step >= 2)
        begun[rank] = len(submitted[rank])
        loss_of(model, x).backward()

    def look(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if hvd.is_initialized():
            counts.append(len(submitted[hvd.rank()]) - begun[hvd.rank()])

    begun, counts = {}, []
    add_up(2, backward, look)
    assert max(counts[-2:]) < 6, "parameters that train"


@pytest.mark.parametrize("first", [0, 12], ids=["from the start", "later"])
@pytest.mark.parametrize("names", [["1.bias"], ["2.weight"], ["0.weight", "0.bias"]], ids="+".join)
def test_a_parameter_that_one_rank_alone_freezes_fails_on_all(names, first):
    """One of a bucket, one that is a bucket, and all of two; the ranks have frozen another one alike."""

    def program():
        model = make_model()
        optimizer = training.wrap(model)
        model[3].bias.requires_grad_(False)
        training.trained(model, optimizer, first, own_backward)
        if hvd.rank() == 1:
            for name in names:
                model.get_parameter(name).requires_grad_(False)
        with pytest.raises(ringreduce.MismatchError) as failed:
            training.trained(model, optimizer, 2, own_backward)
        return str(failed.value)

    for text in run_ranks(2, program):
        assert any(f"'{each}' (requires_grad=False), but rank 0 has no frozen parameter" in text for each in names)


@each_rank_of(2)
def test_a_rank_whose_optimizer_is_new_hears_of_a_frozen_group():
    """As one that comes into an elastic job."""

    def wrapped():
        model = make_model()
        model[0].requires_grad_(False)
        return model, training.wrap(model, groups=[[*model[0].parameters()], [*model[1].parameters()]])

    model, optimizer = wrapped()
    training.trained(model, optimizer, 2, own_backward)
    hvd.join()
    if hvd.rank() == 1:
        new, optimizer = wrapped()
        new.load_state_dict(model.state_dict())
        model = new
    training.trained(model, optimizer, 2, own_backward)
    assert np.array_equal(*hvd.allgather(training.parameters(model)).numpy().reshape(2, -1))


@each_rank_of(2)
def test_a_sparse_gradient_in_between():
    table = torch.nn.Embedding(6, 5, sparse=True).double()
    table.weight.data = torch.arange(30.0, dtype=torch.float64).reshape(6, 5) / 30
    model = make_model()
    both = torch.nn.ModuleList([model[:2], table, model[2:]])
    optimizer = training.wrap(both)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, table(torch.tensor([hvd.rank(), 4]))).backward()
        optimizer.step()
        assert table.weight.grad.is_sparse
        assert table.weight.grad.coalesce().indices().tolist() == [[0, 1, 4]]
    assert ["1.weight"] in bucket_names(optimizer)
    assert max(map(len, bucket_names(optimizer))) > 1
    return training.parameters(both)


@pytest.mark.parametrize("who", [[0, 1], [0]])
def test_a_look_between_two_backwards(who, monkeypatch):
    """The gradients that the second backward is going to compute must not be sent as zeros."""
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", 8)

    def backward(model, x, rank, step):
        for number, loss in enumerate(halves(model, x)):
            if number and hvd.is_initialized() and rank in who and step > 1:
                assert model[3].weight.grad.abs().sum() > 0
            loss.backward()

    add_up(2, backward)


@pytest.mark.parametrize("seen", ["first.wide", "first.narrow"])
def test_a_look_between_two_backwards_at_a_gradient_of_either_type(seen):
    """Each type has a bucket, which the one rank splits before it has sent the other one."""

    def program():
        types = {"wide": torch.float64, "narrow": torch.float32}
        names = [f"{which}.{kind}" for which in ("first", "second") for kind in types]
        model = {each: torch.nn.Parameter(torch.ones(3, dtype=types[each.split(".")[1]])) for each in names}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.values()], lr=0.25), [*model.items()])
        for step in range(STEPS):
            optimizer.zero_grad()
            for which in ("first", "second"):
                sum((hvd.rank() + 1) * model[each].sum() for each in names if which in each).backward()
                if hvd.rank() == step == 1:
                    assert model[seen].grad.tolist() == [1.5] * 3
            optimizer.step()
        return [each.tolist() for each in model.values()]

    assert run_ranks(2, program) == [[[1 - STEPS * 0.25 * 1.5] * 3] * 4] * 2


def test_a_sum_that_is_looked_at_is_not_summed_twice():
    """Rank 0's first loss is looked at by all; then a backward adds to a part of the same bucket."""

    def program(data, wrapped):
        model = make_model()
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = data(step)
            last, first = (loss * len(x) / training.BATCH for loss in halves(model, x))
            first.backward()
            torch.nn.utils.clip_grad_norm_(model[:2].parameters(), 0.01)
            last.backward()
            optimizer.step()
        return training.parameters(model)

    training.trains_as_one_process(2, program, op=hvd.Sum)


@pytest.mark.parametrize("passes", [[2, 2], [2, 1], [1, 2], [0, 2]])
def test_accumulated(passes):
    """passes: by rank, in the third step; two are declared."""

    def backward(model, x, rank, step):
        for number in range(passes[rank] if step == 2 else 2):
            loss_of(model, x[2 * number : 2 * number + 2]).backward()

    add_up(2, backward, backward_passes_per_step=2)


def test_what_lacks_a_backward_is_not_sent_when_another_gradient_is_complete():
    """The second loss computes half of the model for the second and last time, the third the other half."""

    def backward(model, x, rank, step):
        for loss in (loss_of(model, x), *halves(model, x)):
            loss.backward()

    add_up(2, backward, backward_passes_per_step=2)


@each_rank_of(2)
def test_two_optimizers_of_one_backward():
    models = make_model(), make_model(WIDTHS[::-1])
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5), [(prefix + name, p) for name, p in model.named_parameters()]
        )
        for model, prefix in zip(models, "ab", strict=True)
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        hidden = torch.tanh(models[0](training.share(step)))
        (loss_of(models[1], hidden) + hidden.mean()).backward()
        for optimizer in optimizers if hvd.rank() else optimizers[::-1] if step > 1 else optimizers:
            optimizer.step()
    assert all(len(bucket_names(optimizer)) < 8 for optimizer in optimizers)
    return torch.cat([training.parameters(model) for model in models])


def test_worlds_of_other_sizes_and_a_join():
    """One optimizer in worlds of 2, 1 and 3 ranks: the buckets are agreed on anew. Rank 0 joins before it steps."""
    states = {}

    def program():
        model, optimizer = states.setdefault(hvd.rank(), None) or (make_model(), None)
        optimizer = optimizer or training.wrap(model)
        states[hvd.rank()] = model, optimizer
        hvd.broadcast_parameters(model.state_dict())
        for epoch in range(2):
            training.trained(model, optimizer, 3 if hvd.rank() else 2 * epoch, own_backward)
            hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.join())
        return training.trained(model, optimizer, 1, own_backward)

    for size in (2, 1, 3):
        training.same_on_all(run_ranks(size, program))


@each_rank_of(2)
def test_a_mismatch_inside_a_bucket_names_the_tensor():
    model = make_model()
    optimizer = training.wrap(model)
    for step in range(3):
        if step == 2:
            rows = 7 + hvd.rank()
            model[1].bias.data, model[1].weight.data = torch.zeros(rows), torch.zeros(rows, 16)
            model[2].weight.data = torch.zeros(9, rows)
            model.double()
        optimizer.zero_grad()
        loss_of(model, training.share(step)).backward()
        if step == 2:
            with pytest.raises(
                ringreduce.MismatchError, match=r"allreduce '[12]\.(weight|bias)' .*: float64\[.*equal shapes"
            ):
                optimizer.step()
        else:
            optimizer.step()
