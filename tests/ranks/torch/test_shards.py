"""torch's ShardedOptimizer on threads: its state, whole and in parts, and what is refused."""

import copy

import pytest
import torch

import ringreduce
import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of
from tests.support.sharded import (
    DETERMINISTIC,
    OPTIMIZERS,
    after,
    assert_equal,
    bits,
    loss_of,
    model_of,
    plain,
    sharded,
)
from tests.support.tiers import adapters, parted


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=adapters)])
@pytest.mark.parametrize("name", parted(OPTIMIZERS, lambda name: name != "AdamW", adapters))
def test_a_state_dict_is_the_plain_optimizers_and_can_be_loaded_at_another_number_of_ranks(name, shared):
    def saved():
        model, optimizer = sharded(name=name, shared_parameters=shared)
        after(9, optimizer, model)
        return model.state_dict(), optimizer.state_dict()

    def resumed(states):
        model, optimizer = sharded(name=name, shared_parameters=shared)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        again = optimizer.state_dict()
        after(12, optimizer, model, first=9)
        return bits(model), again["state"]

    model = model_of()
    alone = OPTIMIZERS[name](model.parameters())
    after(9, alone, model)
    # equal gradients, whose mean over a power of two of ranks has no rounding
    for weights, state in run_ranks(4, saved, settings=DETERMINISTIC):
        assert_equal(weights.values(), model.state_dict().values())
        assert state.keys() == alone.state_dict().keys()
        torch.testing.assert_close(state, alone.state_dict(), rtol=0, atol=0)
    after(12, alone, model, first=9)
    for found, again in run_ranks(2, lambda: resumed((weights, state)), settings=DETERMINISTIC):
        assert_equal(found, bits(model))
        torch.testing.assert_close(again, state["state"], rtol=0, atol=0)
    other = model_of()
    into = OPTIMIZERS[name](other.parameters())
    other.load_state_dict(weights)
    into.load_state_dict(state)
    after(12, into, other, first=9)
    assert_equal(bits(other), bits(model))


class Counting(torch.optim.SGD):
    """Keeps something in its state that belongs to no parameter."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.state["all"] = {"calls": 0, "length": torch.zeros(3)}

    def step(self, closure=None):
        self.state["all"]["calls"] += 1
        self.state["all"]["length"] += 1
        return super().step(closure)


@each_rank_of(2)
def test_state_that_belongs_to_no_parameter_stays_whole():
    def made():
        model = model_of()
        inner = Counting(model.parameters(), lr=0.1, momentum=0.9)
        return model, hvd.ShardedOptimizer(inner, model.named_parameters())

    def has(optimizer, calls):
        assert optimizer.state["all"]["calls"] == calls
        assert optimizer.state["all"]["length"].tolist() == [calls] * 3

    model, optimizer = made()
    after(2, optimizer, model)
    has(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["all"]["calls"] == 2

    other, loaded = made()
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(saved))
    has(loaded, 2)
    state = hvd.elastic.TorchState(model, optimizer)
    after(3, optimizer, model, first=2)
    after(3, loaded, other, first=2)
    assert_equal(bits(other), bits(model))
    state.restore()
    has(optimizer, 2)

    if hvd.rank() == 1:
        optimizer.state["all"]["calls"] = 7
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    has(optimizer, 2)


def test_after_the_ranks_have_changed_the_state_must_be_given_again():
    def made():
        model, optimizer = sharded()
        after(3, optimizer, model)
        return model, optimizer, optimizer.state_dict(), optimizer.state_dict(sharded=True)

    ranks = run_ranks(2, made)

    def goes_on():
        model, optimizer, state, part = ranks[0]
        with pytest.raises(ringreduce.InputError, match=r"the ranks have changed.*load_state_dict\(\)"):
            after(4, optimizer, model, first=3)
        optimizer.load_state_dict(state)
        with pytest.raises(
            ringreduce.InputError, match="this is the part of rank 0 of 2; expected that of rank 0 of 1"
        ):
            optimizer.load_state_dict(part)
        after(6, optimizer, model, first=3)
        return bits(model)

    def expected():
        model, optimizer = plain()
        after(6, optimizer, model)
        return bits(model)

    torch.testing.assert_close(run_ranks(1, goes_on), run_ranks(1, expected))

    def again():
        _, optimizer = sharded()
        if hvd.rank() == 1:
            optimizer.load_state_dict(ranks[0][2])
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        torch.testing.assert_close(optimizer.state_dict(), ranks[0][2])
        optimizer.load_state_dict(ranks[hvd.rank()][3])
        torch.testing.assert_close(optimizer.state_dict(), ranks[0][2])
        state = copy.deepcopy(ranks[0][2])
        state["state"][0]["exp_avg"] = torch.ones(3)
        with pytest.raises(ringreduce.InputError, match=r"exp_avg of '0.weight' has shape \(3,\); expected \(33, 7\)"):
            optimizer.load_state_dict(state)

    run_ranks(2, again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": hvd.Adasum}, "op=Adasum compares whole gradients"),
        (
            {"compression": hvd.Compression.int8},
            r"compression=Compression.int8; expected Compression.none, .fp16 or .bf16",
        ),
        ({"compression": hvd.Compression.int4.everywhere}, r"compression=Compression.int4.everywhere; expected"),
        ({"compression": ringreduce.PowerSGD(4)}, r"compression=PowerSGD\(.*\); expected"),
        ({"kind": torch.optim.LBFGS}, "LBFGS needs whole parameters"),
    ],
    ids=str,
)
def test_what_needs_whole_gradients_is_refused(options, message):
    def program():
        kind = options.pop("kind", torch.optim.SGD)
        with pytest.raises(ringreduce.InputError, match=message):
            hvd.ShardedOptimizer(kind(model_of().parameters()), **options)

    run_ranks(1, program)


@each_rank_of(2)
def test_gradients_that_are_gone_or_unlike_are_errors():
    model, optimizer = sharded()
    loss_of(model, 0).backward()
    with pytest.raises(ringreduce.InputError, match=r"'0.weight' is reduced.*clip_grad_norm_\(max_norm\)"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ringreduce.InputError, match="norm_type=0; expected a number above 0"):
        optimizer.clip_grad_norm_(1.0, 0)
    optimizer.synchronize()
    with pytest.raises(ringreduce.errors.BackwardError, match="was computed 1 times since the last step"):
        loss_of(model, 0).backward()
    with pytest.raises(ringreduce.InputError, match="cannot be copied or pickled"):
        copy.deepcopy(optimizer)
    optimizer.zero_grad()
    model[0].bias.requires_grad_(hvd.rank() == 0)
    loss_of(model, 0).backward()
    with pytest.raises(
        ringreduce.MismatchError, match=r"reduce_shards .*frozen=\('0.bias',\), but rank 0 has frozen=\(\)"
    ):
        optimizer.step()
    model.requires_grad_(hvd.rank() == 0)
    with pytest.raises(ringreduce.MismatchError, match=r"frozen parameter='.*\(requires_grad=False\), but rank 0"):
        optimizer.step()
    table = torch.nn.Embedding(4, 2, sparse=True)
    _, optimizer = sharded(table)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ringreduce.InputError, match="gradient of 'weight' is sparse"):
        optimizer.step()
    other = torch.nn.Linear(2 + hvd.rank(), 2)
    _, optimizer = sharded(other)
    other(torch.ones(1, 2 + hvd.rank())).sum().backward()
    with pytest.raises(ringreduce.MismatchError, match=r"reduce_shards 'weight'.*all ranks must pass equal shapes"):
        optimizer.step()
    gaps = torch.nn.Module()
    gaps.p = torch.nn.Parameter(torch.ones(4, 4)[:, :2])
    with pytest.raises(ringreduce.InputError, match=r"'p' of shape .* has gaps in its memory"):
        sharded(gaps)


def seen_by_another(model):
    model[0].weight.data = torch.ones(40, 7)[:33]


@pytest.mark.parametrize(
    ("change", "hosts", "memory", "message"),
    [
        (seen_by_another, [0, 0], "/dev/shm", "'0.weight' on cpu has no host memory of its own"),
        (lambda model: model.to("meta"), [0, 0], "/dev/shm", "'3.weight' on meta has no host memory of its own"),
        (lambda model: model, [0, 1], "/dev/shm", "the ranks are on several hosts; expected one"),
        (lambda model: model, [0, 0], "/nowhere", r"/nowhere has no 0.0 MB \(No such file or directory\); enlarge it"),
    ],
    ids=["view", "meta", "hosts", "no memory"],
)
def test_parameters_that_cannot_be_shared(monkeypatch, change, hosts, memory, message):
    def program():
        model = model_of()
        change(model)
        with pytest.raises(ringreduce.InputError, match=f"shared_parameters=True.*{message}"):
            sharded(model, shared_parameters=True)

    monkeypatch.setattr("ringreduce.optim.shared_parameters.SHARED_MEMORY", memory)
    run_ranks(2, program, hosts=hosts)


def test_shared_parameters_that_leave_their_memory_and_ranks_that_change():
    def program():
        model, optimizer = sharded(shared_parameters=True)
        after(1, optimizer, model)
        with pytest.raises(
            ringreduce.InputError, match="optimizer has shared_parameters=True, which elastic jobs do not support"
        ):
            hvd.elastic.TorchState(model, optimizer)
        model.to(torch.float64).to(torch.float32)
        with pytest.raises(ringreduce.InputError, match=r"'3.weight' has left the memory that the ranks share"):
            after(2, optimizer, model, first=1)
        model, optimizer = sharded(shared_parameters=True)
        return model, optimizer, optimizer.state_dict()

    ranks = run_ranks(2, program)

    def goes_on():
        model, optimizer, _ = ranks[hvd.rank()]
        with pytest.raises(
            ringreduce.InputError, match="the ranks have changed; create the model and its optimizer again"
        ):
            after(1, optimizer, model)

    run_ranks(2, goes_on)


def tied_in_part(model):
    model[3].weight.data = model[0].weight.data.view(-1)[: 5 * 33].view(5, 33)


def tied(model):
    model[2].bias.data = model[2].weight.data


TIED = {
    tied_in_part: "'0.weight' and '3.weight' have memory in common|'3.weight' and '0.weight' have memory in common",
    tied: "'2.bias' and '2.weight' have the same memory",
}


@pytest.mark.parametrize(("change", "message"), TIED.items(), ids=[each.__name__ for each in TIED])
@pytest.mark.parametrize("shared", [False, True])
@each_rank_of(2)
def test_parameters_with_memory_in_common_are_refused_whenever_they_are_tied(change, message, shared):
    model = model_of()
    change(model)
    with pytest.raises(ringreduce.InputError, match=message):
        sharded(model, shared_parameters=shared)
    if not shared:
        model, optimizer = sharded()
        after(1, optimizer, model)
        change(model)
        with pytest.raises(ringreduce.InputError, match=message):
            after(2, optimizer, model, first=1)
    model, optimizer = sharded()
    with pytest.raises(ringreduce.InputError, match=r"'0.bias' and 'group.1.parameter.0' have the same memory"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(model[0].bias.data)]})


@pytest.mark.parametrize("shared", [False, True])
def test_one_parameter_under_two_names_is_reduced_and_stepped_once(shared):
    def program():
        made = []
        for wrap in (hvd.DistributedOptimizer, hvd.ShardedOptimizer):
            model = model_of()
            model.tied = torch.nn.Linear(7, 33, bias=False)
            model.tied.weight = model[0].weight
            named = list(model.named_parameters(remove_duplicate=False))
            assert len(named) == 6
            options = {"shared_parameters": shared} if wrap is hvd.ShardedOptimizer else {}
            optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01), named[::-1], **options)
            assert len(optimizer._parameter_names) == 5
            for step in range(3):
                optimizer.zero_grad()
                loss = loss_of(model[:4], step) + model.tied(torch.ones(1, 7)).square().mean()
                loss.backward()
                optimizer.step()
            made.append(bits(model))
        assert_equal(*made)

    run_ranks(3, program, settings=DETERMINISTIC)


@each_rank_of(3)
def test_parameters_that_are_views_of_one_buffer_that_lie_apart():
    made = []
    for wrap in (plain, sharded):
        flat, at = torch.arange(500.0).cos() / 3, 0
        model = model_of()
        for each in model.parameters():
            each.data, at = flat[at : at + each.numel()].view(each.shape), at + each.numel()
        _, optimizer = wrap(model)
        after(3, optimizer, model)
        made.append(flat)
    torch.testing.assert_close(*made)
    return made[1]
