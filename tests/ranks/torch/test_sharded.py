"""torch's ShardedOptimizer on threads: a step has the bits of a DistributedOptimizer's."""

import copy
import time

import pytest
import torch

import ringreduce.torch as hvd
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of
from tests.support.sharded import DETERMINISTIC, OPTIMIZERS, assert_equal, bits, loss_of, model_of, plain, sharded
from tests.support.tiers import adapters, parted


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


SHARED = {"shared_parameters": True}


WORLDS = [
    *(([0] * size, options) for size in (1, 2, 3) for options in ({}, SHARED)),
    ([0] * 4, SHARED),
    ([0, 1, 0, 1], {}),
]


@pytest.mark.parametrize(
    ("hosts", "options", "name"),
    parted(
        [(*world, name) for world in WORLDS for name in OPTIMIZERS],
        lambda hosts, options, name: name == "Adam" or len(hosts) == 2,
        adapters,
    ),
    ids=str,
)
def test_the_bits_are_those_of_a_distributed_optimizer(hosts, options, name):
    def program():
        expected, plain = train(hvd.DistributedOptimizer, name)
        found, optimizer = train(hvd.ShardedOptimizer, name, **options)
        assert_equal(found, expected)
        kept = sum(v.numel() for each in optimizer.state.values() for v in each.values() if v is not None and v.dim())
        whole = sum(v.numel() for each in plain.state.values() for v in each.values() if v is not None and v.dim())
        assert abs(kept * hvd.size() / whole - 1) < 0.01
        return found

    results = run_ranks(len(hosts), program, hosts=hosts, settings=DETERMINISTIC)
    for result in results:
        assert_equal(result, results[0])


class Odd(torch.nn.Module):
    """A scalar, as CLIP's logit_scale; one that is empty, frozen, transposed, of one element, of another type."""

    def __init__(self):
        super().__init__()
        self.logit_scale = torch.nn.Parameter(torch.tensor(2.0))
        self.empty = torch.nn.Parameter(torch.zeros(0, 4))
        self.frozen = torch.nn.Parameter(torch.arange(2.0), requires_grad=False)
        self.turned = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T / 6)
        self.one = torch.nn.Parameter(torch.full((1, 1), 0.5))
        self.wide = torch.nn.Parameter(torch.tensor(0.25, dtype=torch.float64))

    def loss(self, step):
        x = torch.arange(3.0) / 3 + torch.tensor(1.0 + step + hvd.rank()).sin()
        y = ((x @ self.turned).sum() + self.one.sum() * x[0]) * self.logit_scale * self.wide
        return y.tanh() + self.empty.sum()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, SHARED], ids=str)
def test_scalars_and_empty_ones_and_more_ranks_than_elements(name, options):
    def program():
        made = []
        for wrap in (plain, sharded):
            model, optimizer = wrap(Odd(), name, **(options if wrap is sharded else {}))
            for step in range(12):
                optimizer.zero_grad()
                model.loss(step).backward()
                optimizer.step()
                if step == 6:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            made.append((bits(model), optimizer.state_dict()))
        assert_equal(made[0][0], made[1][0])
        torch.testing.assert_close(made[0][1], made[1][1], rtol=0, atol=0)

    run_ranks(4, program, settings=DETERMINISTIC)


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
def test_a_step_does_what_a_distributed_optimizers_does(monkeypatch, hosts, way):
    for size in ("FIRST_BUCKET_BYTES", "BUCKET_BYTES"):  # three buckets, which are reduced together
        monkeypatch.setattr(f"ringreduce.optim.buckets.{size}", 200)

    def program():
        made = []
        for model, optimizer in (plain(**WAYS[way][1]), sharded(**WAYS[way][1])):
            for step in range(11):
                optimizer.zero_grad()
                WAYS[way][0](model, optimizer, step)
            assert len(optimizer._reducer._buckets) >= 3
            made.append(bits(model))
        assert_equal(*made)

    run_ranks(len(hosts), program, hosts=hosts, settings=DETERMINISTIC)


@pytest.mark.parametrize("options", [{}, SHARED], ids=str)
def test_channels_last_two_types_and_modules_that_wait(options):
    def program():
        made = []
        for wrap in (plain, sharded):
            layers = torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten(), torch.nn.Linear(20, 2).double()
            model = torch.nn.Sequential(*layers).to(memory_format=torch.channels_last)
            for parameter in model.parameters():
                parameter.data.copy_(torch.arange(parameter.numel()).view_as(parameter).cos() / 3)
            _, optimizer = wrap(model, **({"overlap": [model[0], model[2]], **options} if wrap is sharded else {}))
            for step in range(12):
                optimizer.zero_grad()
                x = torch.full((1, 3, 4, 4), 1.0 + hvd.rank() + step).sin()
                model[2](model[1](model[0](x)).double()).square().sum().backward()
                optimizer.step()
            made.append([each.clone() for each in model.state_dict().values()])
        assert_equal(*made)
        assert model[0].weight.stride() != model[0].weight.contiguous().stride()

    run_ranks(3, program, settings=DETERMINISTIC)


TURNS = {"in its memory": lambda data: data.t(), "elsewhere": lambda data: data.t().contiguous().t()}


@pytest.mark.parametrize("after_backward", [False, True])
@pytest.mark.parametrize(("where", "options"), [("in its memory", {}), ("in its memory", SHARED), ("elsewhere", {})])
def test_a_parameter_whose_elements_lie_in_another_order_later_keeps_its_momentum(where, options, after_backward):
    """As after model.to(memory_format=torch.channels_last): this rank's piece has other elements then."""

    def program():
        made = []
        for wrap, given in ((hvd.DistributedOptimizer, {}), (hvd.ShardedOptimizer, options)):
            weight, other = torch.nn.Parameter(torch.arange(36.0).view(6, 6).cos()), torch.nn.Parameter(torch.ones(5))
            sgd = torch.optim.SGD([weight, other], lr=0.1, momentum=0.9)
            optimizer = wrap(sgd, [("weight", weight), ("other", other)], **given)
            for step in range(13):
                optimizer.zero_grad()
                for moment in (False, True):
                    if moment is after_backward and step in (2, 10):  # when step() begins to reduce, and when backward
                        weight.data = TURNS[where](weight.data)
                    if not moment:
                        x = (torch.arange(6.0) + hvd.rank() + step).sin()
                        ((x @ weight).square().sum() + (other * x[1:]).cos().sum()).backward()
                optimizer.step()
            momenta = optimizer.state_dict()["state"]
            made.append([weight, other, *(momenta[number]["momentum_buffer"] for number in (0, 1))])
        assert_equal(*made)

    run_ranks(3, program, settings=DETERMINISTIC)


@each_rank_of(2)
def test_a_parameter_that_gets_gaps_later_is_refused():
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = hvd.ShardedOptimizer(torch.optim.SGD([parameter], lr=0.1), [("table", parameter)])
    parameter.data = torch.ones(2, 6)[:, ::2]
    parameter.sum().backward()
    with pytest.raises(ValueError, match=r"'table' of shape \(2, 3\) and strides \(6, 2\) has gaps"):
        optimizer.step()


class Slow(torch.optim.SGD):
    """Rank 1 steps later."""

    def step(self):
        time.sleep(0.1 * (hvd.rank() == 1))
        super().step()


def test_shared_parameters_change_when_all_have_read_them_and_are_read_when_all_have_changed_them():
    def program():
        made = []
        for options in ({}, SHARED):
            model = model_of()
            if options:
                model[0].bias.data += hvd.rank()  # of these, all get the first rank's
            optimizer = hvd.ShardedOptimizer(Slow(model.parameters(), lr=0.1), model.named_parameters(), **options)
            for step in range(2):
                loss_of(model, step).backward()
                optimizer.synchronize()
                before = bits(model)
                time.sleep(0.1 * hvd.rank())
                assert_equal(bits(model), before)
                optimizer.step()
                made.append(bits(model))
        assert_equal(made[0] + made[1], made[2] + made[3])
        hvd.barrier()
        if hvd.rank() == 0:
            model[0].weight.data.fill_(9)
        hvd.barrier()
        assert (model[0].weight == 9).all()
        with open("/proc/self/maps") as maps:
            assert all("(deleted)" in line for line in maps if "/dev/shm/#" in line)
        state = copy.deepcopy(model)
        assert state[0].weight.data_ptr() != model[0].weight.data_ptr()

    run_ranks(3, program)


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
                if step == 10 and hvd.rank() == 1:
                    loss = loss + float("inf") * model[0].bias[0]  # of which one rank has the gradient
                loss.backward()
                if step % 2:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 4.0
            made.append(bits(model))
        assert_equal(*made)

    run_ranks(3, program, settings=DETERMINISTIC)


HEADS = {
    "on one rank": (1, lambda part: hvd.rank() == 0),
    "in the first pass": (2, lambda part: part == 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("passes", "has_head"), HEADS.values(), ids=HEADS)
def test_gradients_that_a_rank_or_a_pass_lacks_are_unscaled_too(passes, has_head, dtype):
    def program():
        made = []
        for wrap in (plain, sharded):
            model = model_of()
            model.head = torch.nn.Parameter(torch.arange(600, dtype=dtype).cos())  # both ranks have elements of it
            _, optimizer = wrap(model, "SGD", backward_passes_per_step=passes)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for step in range(12):
                optimizer.zero_grad()
                for part in range(passes):
                    loss = loss_of(model[:4], passes * step + part)
                    if has_head(part):
                        loss = loss + model.head.square().sum() / 10
                    scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            made.append(bits(model))
        assert_equal(*made)

    run_ranks(2, program, settings=DETERMINISTIC)


@pytest.mark.parametrize("size", [2, 3])
def test_the_bytes_on_the_wire_are_those_of_an_all_reduce(size):
    """Of ranks on hosts of their own."""

    def nbytes(wrap):
        def program():
            model = torch.nn.Linear(120, 100)
            _, optimizer = wrap(model)
            model(torch.ones(1, 120)).sum().backward()
            optimizer.step()

        messages = []
        settings = Settings(algorithm="ring")
        run_ranks(size, program, hosts=range(size), messages=messages, settings=settings)
        return sum(each.nbytes for each in messages if each.nbytes > 1000)

    assert nbytes(sharded) == nbytes(plain) == 2 * (size - 1) * 4 * 12_100
