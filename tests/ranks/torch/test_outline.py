"""Optimizer state is a parameter's by its name, whatever the order of the groups on each rank."""

import functools

import pytest
import torch

import ringreduce.torch as hvd
from ringreduce.optim import buckets, reducer
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of
from tests.support.tiers import parted

NAMES = ["a", "b", "c.w", "c.b"]
VALUES = dict(zip(NAMES, (1.0, 2.0, 3.0, 4.0), strict=True))


class Model(torch.nn.Module):
    """Two parameters have one shape."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        self.c = torch.nn.ParameterDict({"w": torch.ones(2, 2), "b": torch.ones(2)})

    def named(self, names=NAMES):
        own = dict(self.named_parameters())
        return [(name, own[name]) for name in names]


def adam(groups, names, model):
    return torch.optim.Adam([{"params": [each for _, each in model.named(group)]} for group in groups], lr=0.1)


def named_adam(groups, names, model):
    """torch's own names."""
    return torch.optim.Adam([{"params": model.named(group)} for group in groups], lr=0.1)


def wrapped(wrapper, groups, names, model):
    return wrapper(adam(groups, names, model), model.named_parameters())


KINDS = {
    "model": adam,
    "torch's names": named_adam,
    "Average": functools.partial(wrapped, hvd.DistributedOptimizer),
    "Adasum": functools.partial(wrapped, functools.partial(hvd.DistributedOptimizer, op=hvd.Adasum)),
    "LocalSGD": functools.partial(wrapped, functools.partial(hvd.LocalSGD, sync_every=2)),
    "Sharded": functools.partial(wrapped, hvd.ShardedOptimizer),
}


def step(model, optimizer):
    """Each parameter's gradient, and so its moments, are its own."""
    optimizer.zero_grad()
    sum((each.sum() * VALUES[name] for name, each in model.named_parameters()), torch.zeros(())).backward()
    optimizer.step()


def moments(model, optimizer):
    """By name, the mean of each parameter's first moment, and its group's lr."""
    whole = optimizer.state_dict()
    order = [dict.fromkeys(group["params"], group["lr"]) for group in whole["param_groups"]]
    lrs = {number: lr for group in order for number, lr in group.items()}
    names = names_of(model, optimizer)
    of_parameters = {number: of for number, of in whole["state"].items() if number in lrs}
    return {names[number]: (of["exp_avg"].mean().item(), lrs[number]) for number, of in of_parameters.items()}


def names_of(model, optimizer):
    if getattr(optimizer, "is_sharded", False):
        return [shard.name for shard in optimizer._shards()]
    known = {id(each): name for name, each in model.named_parameters()}
    return [known[id(each)] for group in optimizer.param_groups for each in group["params"]]


def expected(steps, lrs=lambda name: 0.1):
    return {name: (pytest.approx(value * (1 - 0.9**steps)), pytest.approx(lrs(name))) for name, value in VALUES.items()}


def lose_state(optimizer, kind):
    """All but the root; but for what each rank has a part of."""
    for each in optimizer.state.values() if hvd.rank() and kind != "Sharded" else ():
        if "exp_avg" in each:
            each["exp_avg"].zero_()


LAYOUTS = {
    "another order": ([["c.b", "b", "a", "c.w"]], [NAMES]),
    "swapped": ([["b", "a", "c.w", "c.b"]], [NAMES]),
    "more groups": ([["b", "a"], ["c.b", "c.w"]], [NAMES]),
    "fewer groups": ([NAMES], [["b"], ["a", "c.b"], ["c.w"]]),
    "other groups": ([["a", "c.b"], ["b", "c.w"]], [["c.b", "c.w"], ["a", "b"]]),
}


@pytest.mark.parametrize("layout", parted(LAYOUTS, lambda layout: layout in ("swapped", "other groups")))
@pytest.mark.parametrize("kind", KINDS)
@each_rank_of(2)
def test_broadcast_optimizer_state_goes_by_names(kind, layout):
    """All ranks have the root's groups then, and train on alike."""
    model = Model()
    optimizer = KINDS[kind](LAYOUTS[layout][hvd.rank()], NAMES, model)
    for _ in range(3 if kind in ("Average", "Adasum", "LocalSGD", "Sharded") or hvd.rank() == 0 else 0):
        step(model, optimizer)
    lose_state(optimizer, kind)
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 * (number + 1) + hvd.rank()
    hvd.broadcast_optimizer_state(optimizer, 0, model)
    of_root = {name: 0.1 * (number + 1) for number, group in enumerate(LAYOUTS[layout][0]) for name in group}
    assert moments(model, optimizer) == expected(3, of_root.__getitem__)
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(each) for each in LAYOUTS[layout][0]]
    hvd.broadcast_parameters(model.state_dict(), 0)
    step(model, optimizer)
    assert moments(model, optimizer) == expected(4, of_root.__getitem__)
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@pytest.mark.parametrize("layout", parted(LAYOUTS, lambda layout: layout in ("swapped", "other groups")))
@pytest.mark.parametrize("kind", KINDS)
@each_rank_of(2)
def test_an_elastic_state_goes_by_names(kind, layout):
    """As to a rank that comes later."""
    model = Model()
    optimizer = KINDS[kind](LAYOUTS[layout][hvd.rank()], NAMES, model)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    for _ in range(2):
        step(model, optimizer)
    lose_state(optimizer, kind)
    state.sync()
    assert moments(model, optimizer) == expected(2)
    step(model, optimizer)
    state.restore()
    assert moments(model, optimizer) == expected(2)
    step(model, optimizer)
    assert moments(model, optimizer) == expected(3)


WITHOUT_NAMES = {
    "a parameter that is missing here": (
        [["a", "b", "c.b"]],
        [["a", "b"]],
        r"rank 1's optimizer has no parameter 'group.0.parameter.2' of shape \(2,\), which rank 0's optimizer has",
    ),
    "one that the root lacks": (
        [["a", "b"]],
        [["a", "b", "c.b"]],
        r"rank 1's optimizer has 'group.0.parameter.2' of shape \(2,\), which rank 0's optimizer lacks",
    ),
    "another shape": (
        [["a", "b", "c.b"]],
        [["a", "c.b", "b"]],
        r"rank 1's optimizer: parameter 'group.0.parameter.1' has shape \(2,\), but \(3,\) in rank 0's optimizer",
    ),
    "other groups": ([["a", "b"], ["c.b"]], [["a", "b", "c.b"]], r"no parameter 'group.1.parameter.0' of shape \(2,\)"),
}


@pytest.mark.parametrize("case", WITHOUT_NAMES)
@each_rank_of(2)
def test_places_stand_for_names_that_nobody_knows(case):
    model, (*groups, message) = Model(), WITHOUT_NAMES[case]
    optimizer = adam(groups[hvd.rank()], NAMES, model)
    before = optimizer.state_dict()["param_groups"]
    with pytest.raises(ValueError, match=message):
        hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.state_dict()["param_groups"] == before, "nothing was changed"


@pytest.mark.parametrize("kind", ["torch's names", "Average", "Sharded"])
@each_rank_of(2)
def test_names_and_shapes_that_differ_are_told(kind):
    model = Model()
    names = ["a", "c.w"] if hvd.rank() == 0 else ["a", "c.b"]
    optimizer = named_adam([names], names, model)
    if kind != "torch's names":
        optimizer = (hvd.DistributedOptimizer if kind == "Average" else hvd.ShardedOptimizer)(optimizer)
    message = r"rank 1's optimizer has no parameter 'c.w' of shape \(2, 2\), which rank 0's"
    with pytest.raises(ValueError, match=message):
        hvd.broadcast_optimizer_state(optimizer, 0)


def unfreezing(kind, names):
    """The head is trained first, and then all of the model; as fine-tuning libraries do."""
    body, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    model = torch.nn.Sequential(body, head)
    for number, each in enumerate(model.parameters()):
        each.data = torch.linspace(-0.5, 0.7, each.numel()).reshape(each.shape) + number / 10
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
    if kind is not None:
        optimizer = kind(optimizer, model.named_parameters() if names else None)
    return model, optimizer


def unfreeze(model, optimizer):
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 2) * (hvd.rank() + 1)).square().mean().backward()
        if kind_is_plain(optimizer):
            for each in model.parameters():
                each.grad = hvd.allreduce(each.grad, name="by hand") if each.grad is not None else None
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def kind_is_plain(optimizer):
    return type(optimizer) is torch.optim.SGD


UNFROZEN = {
    "plain": None,
    "Average": hvd.DistributedOptimizer,
    "Adasum": functools.partial(hvd.DistributedOptimizer, op=hvd.Adasum),
    "PowerSGD": lambda *args: hvd.DistributedOptimizer(*args, compression=hvd.PowerSGD(1, start_step=0)),
    "LocalSGD": functools.partial(hvd.LocalSGD, sync_every=1),
    "Sharded": hvd.ShardedOptimizer,
}


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("kind", UNFROZEN)
@each_rank_of(2)
def test_a_group_that_came_after_the_commit_is_gone_when_it_is_restored(kind, names):
    """And comes again with the same results."""
    model, optimizer = unfreezing(UNFROZEN[kind], names)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, epoch=0)
    state.sync()
    train(model, optimizer, 2)
    state.save()
    results = []
    for _ in range(2):
        unfreeze(model, optimizer)
        results.append(train(model, optimizer, 2))
        state.restore()
        assert [len(group["params"]) for group in optimizer.param_groups] == [2]
        results.append(train(model, optimizer, 2))
        state.restore()
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])
    return results[0]


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("kind", UNFROZEN)
@each_rank_of(2)
def test_a_group_that_a_commit_has_is_made_where_it_is_not(kind, names):
    """As in a process that was started again, or comes late; the state's model names what the optimizer cannot."""
    model, optimizer = unfreezing(UNFROZEN[kind], names)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)
    train(model, optimizer)
    unfreeze(model, optimizer)
    train(model, optimizer)
    state.save()
    expected = train(model, optimizer, 2)
    model, optimizer = unfreezing(UNFROZEN[kind], names)
    fresh = hvd.elastic.TorchState(model, optimizer, epoch=0)
    fresh._committed, fresh._own = state._committed, state._own
    if kind == "Sharded" and not names:
        message = r"has no parameter 'group.1.parameter.0' of shape \(2, 2\), .*which the last commit has; add it to"
        with pytest.raises(ValueError, match=message):
            fresh.restore()
        return torch.zeros(0)
    fresh.restore()
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(2, 0.1), (2, 0.01)]
    assert torch.equal(train(model, optimizer, 2), expected)
    return expected


@pytest.mark.parametrize("how", ["sync", "broadcast"])
@pytest.mark.parametrize("kind", ["Average", "Adasum", "PowerSGD", "LocalSGD"])
@each_rank_of(2)
def test_a_group_that_the_root_has_added_since_its_last_step_all_have(kind, how):
    """The root need not be told of it, as the others have been."""
    model, optimizer = unfreezing(UNFROZEN[kind], True)
    state = hvd.elastic.TorchState(model, optimizer)
    train(model, optimizer, 2)
    if hvd.rank() == 0:
        unfreeze(model, optimizer)
    state.sync() if how == "sync" else hvd.broadcast_optimizer_state(optimizer, 0)
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(2, 0.1), (2, 0.01)]
    return train(model, optimizer, 3)


@pytest.mark.parametrize("kind", ["plain", "Average", "Adasum"])
@each_rank_of(2)
def test_a_parameter_of_another_shape_gets_its_committed_one(kind):
    model, optimizer = unfreezing(UNFROZEN[kind], True)
    unfreeze(model, optimizer)
    state = hvd.elastic.TorchState(model, optimizer)
    train(model, optimizer, 2)
    state.save()
    expected = train(model, optimizer, 2)
    state.restore()
    older = model[0].bias, model[1].weight
    model[0].bias = torch.nn.Parameter(torch.ones(2, 2))  # added to the batch, in rows
    optimizer.state.pop(older[0])
    optimizer.param_groups[1]["params"][1] = model[0].bias
    train(model, optimizer, 2)
    state.restore()
    assert model[0].bias.shape == (2,)
    assert torch.equal(train(model, optimizer, 2), expected)
    model.append(torch.nn.Linear(1, 1))
    with pytest.raises(
        ValueError,
        match=r"the Sequential in the last commit differs from the current one: .*2\.weight.*commit at once when",
    ):
        state.restore()
    return expected


@pytest.mark.parametrize(
    "wrapper", [hvd.DistributedOptimizer, functools.partial(hvd.LocalSGD, sync_every=1), hvd.ShardedOptimizer]
)
@each_rank_of(2)
def test_a_state_dict_with_torchs_names_is_loaded_by_them(wrapper):
    """As rank 0 has saved it, on ranks with another order."""
    model = Model()
    optimizer = wrapper(named_adam(LAYOUTS["other groups"][0], NAMES, model))
    step(model, optimizer)
    saved = hvd.broadcast_object(optimizer.state_dict(), 0)
    other = Model()
    optimizer = wrapper(named_adam([["a", "b"], ["c.w", "c.b"]], NAMES, other))
    optimizer.load_state_dict(saved)
    assert moments(other, optimizer) == expected(1)
    saved["param_groups"][0]["param_names"][0] = "x"
    with pytest.raises(ValueError, match=r"load_state_dict: only .* has a parameter '.*'; expected the same names"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("cautious", [0, 8])
def test_a_sharded_optimizer_has_one_order_on_all_ranks(cautious, shared, monkeypatch):
    """That of rank 0; what it steps, and saves, is each parameter's own."""
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", cautious)
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1)

    def program():
        model = Model()
        optimizer = named_adam([LAYOUTS["another order"][hvd.rank()][0]], NAMES, model)
        optimizer = hvd.ShardedOptimizer(optimizer, shared_parameters=shared)
        for _ in range(3):
            step(model, optimizer)
        assert moments(model, optimizer) == expected(3)
        optimizer.load_state_dict(optimizer.state_dict())
        step(model, optimizer)
        assert moments(model, optimizer) == expected(4)
        return torch.cat([each.detach().reshape(-1) for each in model.parameters()])

    assert torch.equal(*run_ranks(2, program))


@each_rank_of(3)
def test_a_parameter_that_only_one_rank_divides_is_named():
    model = Model()
    names = NAMES[: 4 - hvd.rank() // 2]
    optimizer = hvd.ShardedOptimizer(named_adam([names], names, model))
    with pytest.raises(
        ValueError, match=r"rank 0 has a parameter 'c\.b', but rank 2 does not; expected the same on all"
    ):
        step(model, optimizer)


@each_rank_of(2)
def test_a_ranks_own_part_is_not_loaded_into_other_parameters():
    """Though they are as large."""
    first, second = (
        hvd.ShardedOptimizer(adam([names], names, model), model.named_parameters())
        for names, model in ((["a", "b"], Model()), (["b", "a"], Model()))
    )
    part = first.state_dict(sharded=True)
    first.load_state_dict(part)
    with pytest.raises(ValueError, match=r"expected that of rank .*, of the same model, its parameters in the same"):
        second.load_state_dict(part)
    del part["shards"]["names"]  # as of an older version
    first.load_state_dict(part)
