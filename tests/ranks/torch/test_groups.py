"""Parameters that enter or leave param_groups by themselves: they are reduced, or let go, from that very step on."""

import functools
import gc
import weakref

import pytest
import torch

import ringreduce.torch as hvd
from ringreduce.optim import buckets, reducer
from ringreduce.testing import run_ranks
from ringreduce.torch.groups import MOST_NAMES, Change
from tests.support import training
from tests.support.on_threads import each_rank_of
from tests.support.opcodes import opcodes_of
from tests.support.tiers import parted

STEPS = 6


class Points(torch.nn.Module):
    """Shapes change as training goes on; 3D Gaussian splatting does so."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, 5).double())
        self.extra = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3, 2).double() / 3)])
        self.b = torch.nn.Parameter(torch.zeros(2).double())

    def forward(self, x):
        total = (x * self.w[:5]).sum(1) + self.w[5:].sum() * x[:, 0]
        for number, each in enumerate(self.extra):
            total = total + each.sum() * x[:, number] + each.square().sum() * x[:, number + 1]
        return total.unsqueeze(1) + self.b * x[:, :2]


def appended(model, optimizer, _):
    model.extra.append(torch.nn.Parameter(torch.full((2, 2), 0.3).double()))
    optimizer.param_groups[0]["params"].append(model.extra[-1])


def added_to_the_base(model, optimizer, inner):
    model.extra.append(torch.nn.Parameter(torch.full((4,), 0.2).double()))
    inner.add_param_group({"params": [model.extra[-1]], "lr": 0.05})


def added(model, optimizer, _):
    model.extra.append(torch.nn.Parameter(torch.full((4,), 0.2).double()))
    optimizer.add_param_group({"params": [model.extra[-1]], "lr": 0.05})


def replaced(model, optimizer, _, grown=1):
    """Adam's state comes along."""
    older, model.w = model.w, torch.nn.Parameter(torch.cat([model.w.detach(), torch.ones(grown).double() / 4]))
    params = optimizer.param_groups[0]["params"]
    params[next(number for number, each in enumerate(params) if each is older)] = model.w
    state = optimizer.state.pop(older, {})
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        if state.get(key) is not None:
            state[key] = torch.cat([state[key], torch.zeros(grown).double()])
    optimizer.state[model.w] = state


def replaced_by_the_same_shape(model, optimizer, inner):
    replaced(model, optimizer, inner, grown=0)


def removed(model, optimizer, _):
    model.b.requires_grad_(False)
    optimizer.state.pop(optimizer.param_groups[0]["params"].pop(1), None)  # b, or a piece of it


def all_new(model, optimizer, _):
    """Another module, in a new list of new groups."""
    model.__init__()
    with torch.no_grad():
        model.w += 0.5
    optimizer.state.clear()
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    optimizer.param_groups = [{**options, "params": [each]} for each in model.parameters()]


CHANGES = [appended, added_to_the_base, added, replaced, replaced_by_the_same_shape, removed, all_new]


def trains(change, when, make, data, wrapped, passes=1, clips=True):
    """What each rank does; `when` is where in a step the groups change."""
    model = Points()
    inner = make(model.parameters())
    optimizer = wrapped(inner, model)

    def may_change(step, here):
        if when == here and step in (2, 4) and not (step == 4 and change in (removed,)):
            change(model, optimizer, inner)

    for step in range(STEPS):
        may_change(step, "before zero_grad")
        optimizer.zero_grad()
        may_change(step, "before backward")
        for part in range(passes):
            (training.loss_of(model, data(step * passes + part)) / passes).backward()
        if clips and not (change is all_new and when == "before backward"):  # nothing can see that before step()
            torch.nn.utils.clip_grad_norm_([each for g in optimizer.param_groups for each in g["params"]], 0.7)
        may_change(step, "before step")
        optimizer.step()
    return training.parameters(model)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.03)


OPTIONS = {
    "plain": {},
    "groups": {"groups": 2},
    "passes": {"backward_passes_per_step": 2},
    "waiting": {"wait_in_backward": True},
}


@pytest.mark.parametrize("cautious", parted([0, 8], lambda steps: steps == 0))
@pytest.mark.parametrize("when", ["before zero_grad", "before backward", "before step"])
@pytest.mark.parametrize("change", CHANGES)
def test_ranks_train_as_one_process(change, when, cautious, monkeypatch):
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", cautious)
    training.trains_as_one_process(2, functools.partial(trains, change, when, adam))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("change", parted(CHANGES, lambda change: change in (appended, replaced)))
def test_with_the_options_of_a_distributed_optimizer(change, options):
    passes = OPTIONS[options].get("backward_passes_per_step", 1)
    program = functools.partial(trains, change, "before backward", sgd, passes=passes)
    training.trains_as_one_process(3, program, **OPTIONS[options])


@pytest.mark.parametrize("when", ["before zero_grad", "before step"])
@pytest.mark.parametrize("change", [appended, added_to_the_base, added, removed])
def test_of_a_sharded_optimizer(change, when):
    program = functools.partial(trains, change, when, adam, clips=False)
    training.trains_as_one_process(3, program, kinds=[hvd.ShardedOptimizer])


@pytest.mark.parametrize("change", CHANGES)
def test_of_local_steps_that_average_each_time(change):
    """Momentum is each rank's own, so there is none here."""
    program = functools.partial(
        trains, change, "before backward", functools.partial(torch.optim.SGD, lr=0.1), clips=False
    )
    training.trains_as_one_process(3, program, kinds=[functools.partial(hvd.LocalSGD, sync_every=1)])


@pytest.mark.parametrize("change", CHANGES)
@each_rank_of(2)
def test_with_adasum_all_ranks_stay_equal(change):
    def wrapped(inner, model):
        return hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum)

    return trains(change, "before step", adam, training.share, wrapped, clips=False)


WRAPPERS = {
    "Average": hvd.DistributedOptimizer,
    "Adasum": functools.partial(hvd.DistributedOptimizer, op=hvd.Adasum),
    "PowerSGD": lambda *args: hvd.DistributedOptimizer(*args, compression=hvd.PowerSGD(1, start_step=0)),
    "Sharded": hvd.ShardedOptimizer,
    "LocalSGD": functools.partial(hvd.LocalSGD, sync_every=2),
    "DiLoCo": functools.partial(hvd.DiLoCo, sync_every=2, delay=1, outer=hvd.Nesterov()),
}


def extra(count):
    return torch.nn.Parameter(torch.ones(count).double())


def one_alone(model, optimizer):
    if hvd.rank() == 1:
        optimizer.param_groups[0]["params"].append(extra(2))


def one_without(model, optimizer):
    if hvd.rank() == 1:
        optimizer.param_groups[0]["params"].pop()


def of_other_shapes(model, optimizer):
    optimizer.param_groups[0]["params"].append(extra(2 + hvd.rank()))


ALONE = "'group.0.parameter.4', .*, is new"
DISAGREEMENTS = {
    one_alone: f"no change of param_groups, but rank 0 has .*{ALONE}|{ALONE}.*but rank 0 has no change of param_groups",
    one_without: "'2.bias'(, .*)? is gone, but rank 0 has no change of param_groups",
    of_other_shapes: r"'group.0.parameter.4', .*\[3\], is new, but rank 0 has .*'group.0.parameter.4', .*\[2\], is new",
}


@pytest.mark.parametrize("cautious", parted([0, 8], lambda steps: steps == 8))
@pytest.mark.parametrize("disagreement", DISAGREEMENTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_ranks_whose_groups_change_otherwise_are_told_which_parameter(wrapper, disagreement, cautious, monkeypatch):
    """In that very step, though it has several buckets; nobody waits for ever, and the ranks can go on."""
    monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", cautious)
    monkeypatch.setattr(buckets, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    is_local = wrapper in ("LocalSGD", "DiLoCo")

    def program():
        model = training.make_model()
        optimizer = WRAPPERS[wrapper](torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        training.trained(model, optimizer, 2)
        before = list(optimizer.param_groups[0]["params"])
        disagreement(model, optimizer)

        def measured():
            training.trained(model, optimizer, 1)
            return hvd.allreduce(torch.ones(()), name="a metric")

        with pytest.raises(hvd.HorovodInternalError, match=DISAGREEMENTS[disagreement]):
            training.trained(model, optimizer, 3) if is_local else measured()
        if not is_local:
            optimizer.param_groups[0]["params"] = before
            hvd.broadcast_parameters(model.state_dict())
            measured()
        return training.parameters(model) if not is_local else None

    first, second = run_ranks(2, program)
    assert is_local or torch.equal(first, second)


@pytest.mark.parametrize("wrapper", [hvd.DistributedOptimizer, hvd.ShardedOptimizer])
@pytest.mark.parametrize("when", ["before zero_grad", "before backward", "before step"])
def test_all_leave_and_others_come_later(wrapper, when):
    """As where param_groups is cleared, and filled again; between, a step has nothing to reduce."""

    def program(data, wrapped):
        model = training.make_model()
        optimizer = wrapped(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), model)
        for step in range(6):
            changes = {
                2: optimizer.param_groups.clear,
                4: lambda: optimizer.add_param_group({"params": model[2].weight}),
            }
            change = changes.get(step, lambda: None)
            change() if when == "before zero_grad" else None
            optimizer.zero_grad()
            model.zero_grad()
            change() if when == "before backward" else None
            training.loss_of(model, data(step)).backward()
            change() if when == "before step" else None
            optimizer.step()
        return training.parameters(model)

    training.trains_as_one_process(2, program, kinds=[wrapper])


@pytest.mark.parametrize("wrapper", ["Average", "Adasum", "LocalSGD"])
@each_rank_of(2)
def test_what_is_gone_is_let_go(wrapper):
    """Its hooks, too; and nothing is sent for it, or waited for, from the next step on."""
    model = training.make_model()
    optimizer = WRAPPERS[wrapper](torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    training.trained(model, optimizer, 3)
    older, model[2] = weakref.ref(model[2].weight), training.make_model(seed=1)[2]
    hooks = model[0].bias._post_accumulate_grad_hooks
    params = optimizer.param_groups[0]["params"]
    params[2:] = model[2].parameters()
    training.trained(model, optimizer, 1)
    del params[1]
    training.trained(model, optimizer, 1)
    gc.collect()
    assert older() is None
    assert not hooks
    if wrapper != "LocalSGD":
        names = {name: each for each, name in optimizer._parameter_names.items()}
        assert names["2.weight"] is model[2].weight, "it has taken over the name"
        assert "0.bias" not in names
    return training.trained(model, optimizer, 3)


@each_rank_of(2)
def test_names_that_are_known_are_used_and_all_differ():
    model, further = training.make_model(), [extra(2), extra(2), extra(2)]
    named = [*model.named_parameters(), ("unfrozen", further[0])]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1), named)
    params = optimizer.param_groups[0]["params"]
    params += [further[0], model[2].weight, further[1]]
    training.trained(model, optimizer, 1)
    names = ["0.weight", "0.bias", "unfrozen", "2.weight", "group.0.parameter.4"]
    assert [optimizer._parameter_names[each] for each in params] == names
    params.pop(3)
    params.insert(0, further[2])
    training.trained(model, optimizer, 1)
    params += [model[2].weight, extra(1)]
    optimizer.param_groups[0]["params"] = params[1:2] + params[:1] + params[2:]
    training.trained(model, optimizer, 1)
    params = optimizer.param_groups[0]["params"]
    names = ["0.weight", "group.0.parameter.0", "0.bias", "unfrozen", "group.0.parameter.4", "2.weight"]
    assert [optimizer._parameter_names[each] for each in params] == [*names, "group.0.parameter.6"]


def test_it_is_said_once_by_one_rank(capsys):
    def program():
        model, optimizer = training.wrapped()
        for _ in range(2):
            optimizer.param_groups[0]["params"].append(extra(3))
            training.trained(model, optimizer, 2)
        optimizer.add_param_group({"params": [extra(4)]})
        training.trained(model, optimizer, 1)

    run_ranks(2, program)
    (line,) = capsys.readouterr().err.splitlines()
    assert "param_groups was changed outside the optimizer: 'group.0.parameter.4', float64[3], is new (train" in line
    assert line.endswith("; gradients of new parameters are reduced from now on")


@pytest.mark.parametrize(
    ("then", "wrap"),
    [
        ("gradients of {} reduced", hvd.DistributedOptimizer),
        ("{} averaged", functools.partial(hvd.LocalSGD, sync_every=1)),
    ],
)
def test_it_is_said_what_becomes_of_removed_ones(then, wrap, capsys):
    def program():
        model = training.make_model()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for length in (4, 3):
            optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:length]
            training.trained(model, optimizer, 1)

    run_ranks(2, program)
    (line,) = capsys.readouterr().err.splitlines()
    assert "'2.bias' is gone (" in line
    assert line.endswith("; " + then.format("removed parameters are no longer"))


@each_rank_of(2)
def test_a_replaced_one_stays_in_the_users_group():
    """Which is reduced all or nothing, and once in a step."""
    model = training.make_model()
    inner, groups = torch.optim.SGD(model.parameters(), lr=0.01), [[model[0].bias, model[2].bias]]
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), groups=groups, op=hvd.Sum)
    training.trained(model, optimizer, 2)
    model[0].bias = torch.nn.Parameter(torch.ones(16).double())
    optimizer.param_groups[0]["params"][1] = model[0].bias
    optimizer.zero_grad()
    training.own_backward(model, 2)
    read = [each.grad.clone() for each in (model[0].bias, model[2].bias)]
    optimizer.step()
    assert torch.equal(torch.cat(read), torch.cat([model[0].bias.grad, model[2].bias.grad]))
    bucket = optimizer._reducer._gradients[id(model[0].bias)].bucket
    assert [each.parameter for each in bucket.members] == [model[0].bias, model[2].bias]
    return training.trained(model, optimizer, 2)


@pytest.mark.parametrize("wrapper", ["Average", "Sharded"])
@each_rank_of(2)
def test_a_new_one_that_no_rank_has_a_gradient_of_is_not_stepped_when_it_comes(wrapper):
    """As in one process: zeros would decay it, and move it by its momentum."""
    model, unused = training.make_model(), extra(3)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = WRAPPERS[wrapper](inner, model.named_parameters())
    training.trained(model, optimizer, 2)
    optimizer.param_groups[0]["params"].append(unused)
    result = training.trained(model, optimizer, 1)
    assert torch.equal(unused, torch.ones(3).double())
    assert unused.grad is None
    return result


@each_rank_of(2)
def test_lbfgs_has_a_list_of_its_own():
    """And steps what is in that, whatever the group has."""
    model = training.make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["params"] = list(model[0].parameters())

        def closure(step=step):
            optimizer.zero_grad()
            loss = training.loss_of(model, training.share(step))
            loss.backward()
            return loss

        optimizer.step(closure)
    return training.parameters(model)


@each_rank_of(2)
def test_a_sharded_optimizer_divides_what_took_a_place_or_says_what_it_cannot():
    model = training.make_model()
    optimizer = hvd.ShardedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
    training.trained(model, optimizer, 2)
    model[2].bias = torch.nn.Parameter(torch.ones(3).double())
    optimizer.param_groups[0]["params"][3] = model[2].bias
    training.trained(model, optimizer, 2)
    assert optimizer.state_dict()["state"][3]["exp_avg"].shape == (3,)
    params = optimizer.param_groups[0]["params"]
    state = optimizer.state.pop(params[1])
    model[0].bias = torch.nn.Parameter(torch.ones(16).double())
    params[1], optimizer.state[model[0].bias] = model[0].bias, state
    with pytest.raises(RuntimeError, match=r"'0.bias' of shape \(16,\) has come .* with exp_avg of another shape"):
        training.trained(model, optimizer, 1)


@pytest.mark.parametrize("count", [3, MOST_NAMES, MOST_NAMES + 5])
def test_changes_are_told_apart_also_by_what_is_not_named(count):
    new = [(f"{number:02}.w", torch.ones(2)) for number in range(count)]
    others = [*new[:-1], (new[-1][0], torch.ones(3))]
    texts = [str(Change(each, [], True)) for each in (new, new[::-1], others)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) < 100 * MOST_NAMES


@each_rank_of(2)
def test_a_sharded_parameter_that_grows_in_place_is_refused():
    """Its pieces would stay those of the old one."""
    model = training.make_model()
    optimizer = hvd.ShardedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model.named_parameters())
    model[2].bias.data = torch.ones(6, 3).double()
    with pytest.raises(ValueError, match=r"'2\.bias' has 18 elements now, but 3 when it was divided"):
        training.trained(model, optimizer, 1)


@each_rank_of(1)
def test_the_look_calls_no_function_of_pythons_for_a_parameter():
    counts = []
    for size in (4, 160):
        parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(size)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
        counts.append(opcodes_of(optimizer._reducer.owned.have_changed))
    assert counts[0] == counts[1]
