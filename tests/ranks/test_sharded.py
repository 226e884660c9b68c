"""ShardedOptimizer on threads: the bits of DistributedOptimizer's, 1/P of the state, what is refused."""

import copy

import pytest
import torch

import ringreduce.compression
import ringreduce.torch as hvd
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.ranks.on_threads import each_rank_of

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
}
DETERMINISTIC = Settings(deterministic=True)


def model_of(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    layers = torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5, bias=False)
    model = torch.nn.Sequential(*layers)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 3
    return model.to(dtype)


def loss_of(model, step, rank=None):
    generator = torch.Generator().manual_seed(100 * step + (hvd.rank() if rank is None else rank))
    x = torch.randn(6, 7, generator=generator).to(next(model.parameters()).dtype)
    return (model(x)[:, :5] - x[:, :5]).square().mean()


def bits(model):
    return [each.detach().clone() for each in model.parameters()]


def groups_of(model):
    """Two, of which a scheduler changes the learning rate."""
    parameters = list(model.parameters())
    return [{"params": parameters[:3], "lr": 0.05}, {"params": parameters[3:]}]


def train(wrap, name, steps=12, **options):
    model = model_of()
    optimizer = wrap(OPTIMIZERS[name](groups_of(model)), model.named_parameters(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
    return bits(model), optimizer


def assert_equal(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("hosts", [[0], [0, 0], [0, 0, 0], [0, 1, 0, 1]], ids=str)
def test_the_bits_are_those_of_a_distributed_optimizer(hosts, name):
    def program():
        expected, plain = train(hvd.DistributedOptimizer, name)
        found, optimizer = train(hvd.ShardedOptimizer, name)
        assert_equal(found, expected)
        kept = sum(v.numel() for each in optimizer.state.values() for v in each.values() if v is not None and v.dim())
        whole = sum(v.numel() for each in plain.state.values() for v in each.values() if v is not None and v.dim())
        assert abs(kept * hvd.size() / whole - 1) < 0.01
        return found

    results = run_ranks(len(hosts), program, hosts=hosts, settings=DETERMINISTIC)
    for result in results:
        assert_equal(result, results[0])


def sharded(model=None, name="Adam", **options):
    model = model or model_of()
    return model, hvd.ShardedOptimizer(OPTIMIZERS[name](model.parameters()), model.named_parameters(), **options)


def plain(model=None, name="Adam", **options):
    model = model or model_of()
    return model, hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), model.named_parameters(), **options)


def frozen(model, optimizer, step):
    """A part is frozen for a while; and one rank lacks a gradient."""
    model[0].weight.requires_grad_(step not in (2, 3))
    loss_of(model[:3] if step == 5 and hvd.rank() else model, step).backward()
    optimizer.step()


def twice(model, optimizer, step):
    for part in range(2):
        loss_of(model, 2 * step + part).backward()
    optimizer.step()


def closure(model, optimizer, step):
    def computed():
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        return loss

    assert optimizer.step(computed) > 0


def horovods(model, optimizer, step):
    loss_of(model, step).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


def moved(model, optimizer, step):
    """As .to() may do, and load_state_dict."""
    model[0].weight.data = model[0].weight.data.clone() * 0.5
    horovods(model, optimizer, step)


def more_groups(model, optimizer, step):
    if step == 1:
        model.more = torch.nn.Parameter(torch.ones(5))
        optimizer.add_param_group({"params": [model.more], "lr": 0.5})
    (loss_of(model, step) * getattr(model, "more", torch.ones(1)).square().sum()).backward()
    optimizer.step()


WAYS = {
    "frozen, missing": (frozen, {}),
    "passes": (twice, {"backward_passes_per_step": 2}),
    "closure": (closure, {}),
    "synchronize": (horovods, {"op": hvd.Sum}),
    "moved": (moved, {"gradient_predivide_factor": 2.0}),
    "float16": (horovods, {"compression": hvd.Compression.fp16}),
    "bfloat16": (horovods, {"compression": hvd.Compression.bf16}),
    "more groups": (more_groups, {}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1]], ids=str)
def test_a_step_does_what_a_distributed_optimizers_does(hosts, way):
    def program():
        made = []
        for model, optimizer in (plain(**WAYS[way][1]), sharded(**WAYS[way][1])):
            for step in range(11):
                optimizer.zero_grad()
                WAYS[way][0](model, optimizer, step)
            made.append(bits(model))
        assert_equal(*made)

    run_ranks(len(hosts), program, hosts=hosts, settings=DETERMINISTIC)


def test_channels_last_two_types_and_modules_that_wait():
    def program():
        made = []
        for wrap in (plain, sharded):
            layers = torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten(), torch.nn.Linear(20, 2).double()
            model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
            for parameter in model.parameters():
                parameter.data.copy_(torch.arange(parameter.numel()).view_as(parameter).cos() / 3)
            _, optimizer = wrap(model, **({"overlap": [model[0], model[2]]} if wrap is sharded else {}))
            for step in range(12):
                optimizer.zero_grad()
                x = torch.full((1, 3, 4, 4), 1.0 + hvd.rank() + step).sin()
                model[2](model[1](model[0](x)).double()).square().sum().backward()
                optimizer.step()
            made.append([each.clone() for each in model.state_dict().values()])
        assert_equal(*made)
        assert model[0].weight.stride() != model[0].weight.contiguous().stride()

    run_ranks(3, program, settings=DETERMINISTIC)


@pytest.mark.parametrize("way", ["norm 2", "norm 1", "norm inf"])
def test_clipping_is_by_the_norm_over_all_ranks(way):
    norm_type = float(way.split()[1])

    def program():
        made = []
        for model, optimizer in (plain(name="SGD"), sharded(name="SGD")):
            loss_of(model, 0).backward()
            if made:
                norm = optimizer.clip_grad_norm_(0.01, norm_type)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type)
            optimizer.step()
            made.append([norm.float(), *bits(model)])
        torch.testing.assert_close(*made)

    run_ranks(3, program)


def test_a_step_of_which_one_rank_finds_infinite_gradients_is_skipped_by_all():
    def program():
        made = []
        for model, optimizer in (plain(), sharded()):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for step in range(12):
                optimizer.zero_grad()
                loss = scaler.scale(loss_of(model, step))
                (loss * float("inf") if step == 10 and hvd.rank() == 1 else loss).backward()
                if step % 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 4.0
            made.append(bits(model))
        assert_equal(*made)

    run_ranks(3, program, settings=DETERMINISTIC)


def after(steps, optimizer, model, first=0):
    for step in range(first, steps):
        optimizer.zero_grad()
        loss_of(model, step, rank=7).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_dict_is_the_plain_optimizers_and_can_be_loaded_at_another_number_of_ranks(name):
    def saved():
        model, optimizer = sharded(name=name)
        after(9, optimizer, model)
        return model.state_dict(), optimizer.state_dict()

    def resumed(states):
        model, optimizer = sharded(name=name)
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
        ({"compression": ringreduce.compression.Compressor}, r"expected Compression.none, .fp16 or .bf16"),
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
    table = torch.nn.Embedding(4, 2, sparse=True)
    _, optimizer = sharded(table)
    with pytest.raises(ringreduce.InputError, match="gradient of 'weight' is sparse"):
        table(torch.tensor([1])).sum().backward()
    other = torch.nn.Linear(2 + hvd.rank(), 2)
    _, optimizer = sharded(other)
    other(torch.ones(1, 2 + hvd.rank())).sum().backward()
    with pytest.raises(ringreduce.MismatchError, match=r"reduce_shards 'weight'.*all ranks must pass equal shapes"):
        optimizer.step()
    gaps = torch.nn.Module()
    gaps.p = torch.nn.Parameter(torch.ones(4, 4)[:, :2])
    with pytest.raises(ringreduce.InputError, match=r"'p' of shape .* has gaps in its memory"):
        sharded(gaps)
