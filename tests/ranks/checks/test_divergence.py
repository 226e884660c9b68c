"""check=divergence: each cause is named, with rank, parameter and step; and ranks that are alike are left alone."""

import copy
import functools
import gc
import re

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer would: what is there now, conftest.py freezes, and no look for a model meets

import ringreduce as rr
from ringreduce.checks.blame import TRAINS
from ringreduce.checks.divergence import compare_from_second_step, compare_parts, part_of, parts_of
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.torch import parts

EVERY = 4
SETTINGS = Settings(check=f"divergence:{EVERY}", stall_check_s=0)
UNTOUCHED = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))


@pytest.fixture(scope="module", autouse=True)
def what_tests_before_have_left_is_passed_over():
    gc.collect()
    gc.freeze()


def trained(change=lambda step, model, optimizer: None, begin=lambda model: None, steps=20):
    """Train on each rank's own data, in which `change` interferes, and may say that the step is not made."""
    model = copy.deepcopy(UNTOUCHED)
    begin(model)
    half_built = torch.nn.Linear.__new__(torch.nn.Linear)  # such a one is met where another thread is building a model
    vars(half_built)["found"] = dict(model.named_parameters())
    named = [(name, each) for name, each in model.named_parameters() if name != "own"]
    optimizer = rr.DistributedOptimizer(torch.optim.Adam([each for _, each in named], lr=0.01), named)
    for step in range(steps):
        optimizer.zero_grad()
        data = torch.arange(20.0).reshape(5, 4).sin() * (1 + rr.rank() / 10) + rr.rank() / 10 + step / 100
        model(data).square().mean().backward()
        if change(step, model, optimizer) is None:
            optimizer.step()


def trains(change, begin, steps=20):
    """A job of four ranks."""
    return functools.partial(trained, change, begin, steps), 4, SETTINGS


def without_buffers(model):
    model[1] = torch.nn.Identity()


def seed(model):
    without_buffers(model)
    if rr.rank() == 1:
        model[2].weight.data += 1


def frozen(model):
    without_buffers(model)
    model[0].bias.requires_grad_(rr.rank() != 2)


def elsewhere(model):
    without_buffers(model)
    model.own = torch.nn.Parameter(torch.arange(3.0) * (1 + rr.rank() // 2))


def skips(step, model, optimizer):
    optimizer.synchronize()
    if step == 13 and rr.rank() == 1:
        return "no step"
    with optimizer.skip_synchronize():
        optimizer.step()
    return "a step"


def reads_and_skips(step, model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return "no step" if step == 13 and rr.rank() == 1 else None


def flips(step, model, optimizer):
    if step == 13 and rr.rank() == 2:
        model[2].bias.data.view(torch.int32)[1] ^= 1 << 12  # one that later steps do not round away


CASES = {
    "equal": (trains(lambda *_: None, without_buffers), []),
    "seed": (
        trains(lambda *_: None, seed),
        r"after 0 steps \(not compared before\) parameter '2.weight' differs: rank 1 from ranks 0,2-3; the other 3 do "
        r"not. They were never found equal: broadcast them from rank 0",
    ),
    "frozen": (
        trains(lambda *_: rr.barrier() or "no step", frozen, steps=1),  # a step would not end
        r"after 0 steps .* '0.bias' differs: rank 2 from ranks 0-1,3; .* On rank 2, '0.bias' is frozen",
    ),
    "not passed to the optimizer": (
        trains(lambda *_: None, elsewhere),
        r"after 0 steps .* 'own' differs: ranks 0-1 from ranks 2-3; the other 4 do not. No DistributedOptimizer has it",
    ),
    "skipped": (
        trains(skips, without_buffers),
        r"after 16 steps \(equal after 12\) parameter '0.weight' differs: rank 1 from ranks 0,2-3; so do 3 more of 4: "
        r"'0.bias', '2.weight', '2.bias'. rank 1 took 15 steps, ranks 0,2-3 16",
    ),
    "read, and skipped": (
        trains(reads_and_skips, without_buffers),
        r"after 16 steps .* rank 1 took 15 steps, ranks 0,2-3",
    ),
    "BatchNorm": (
        trains(lambda *_: None, lambda model: None),
        r"after 0 steps .* buffer '1.running_mean' differs: each of ranks 0-3 has its own; so do 1 more of 3: "
        r"'1.running_var'. Each .*SyncBatchNorm",
    ),
    "a bit": (
        trains(flips, without_buffers),
        r"after 16 steps \(equal after 12\) parameter '2.bias' differs: rank 2 from ranks 0-1,3; the other 3 do not. "
        r"All ranks took the same number of steps, with equal gradients: something else has changed it",
    ),
}


def found(capsys, program, size=4, settings=SETTINGS):
    """What the check says while this program runs."""
    run_ranks(size, program, settings=settings)
    return [each.removeprefix("ringreduce: ") for each in capsys.readouterr().err.splitlines() if "check=" in each]


class Sgd:
    def __init__(self, params):
        self.params = params

    def step(self, grads):
        for name, grad in grads.items():
            self.params[name] -= 0.1 * grad

    def update(self, grads, params):
        return {name: params[name] - 0.1 * grad for name, grad in grads.items()}


@pytest.mark.parametrize("passes_params", [False, True])
@pytest.mark.parametrize(
    ("wrong_at", "expected"), [(None, 0), (217, r"after 218 steps \(equal after 217\).* 'p?a?r?a?m?s?0?.w'")]
)
def test_an_optimizer_of_no_framework(capsys, passes_params, wrong_at, expected):
    def program():
        params = {"b": np.zeros(3), "w": np.arange(1300.0)}
        optimizer = rr.DistributedOptimizer(Sgd(params))
        for step in range(400):
            grads = {name: np.sin(each + step + rr.rank()) for name, each in params.items()}
            if passes_params:
                params = optimizer.update(grads, params)
            else:
                optimizer.step(grads)
            if step == wrong_at and rr.rank() == 0:
                params["w"].view(np.uint8)[-1] ^= 64

    said = found(capsys, program, 2, settings=Settings(check="divergence:1"))
    assert len(said) == bool(expected), said
    assert not expected or re.search(expected + " differs: each of ranks 0-1 has its own", said[0]), said


def test_it_is_switched_on_and_off_at_run_time_and_local_steps_are_left_alone(capsys):
    def program():
        for text, wrong in [("divergence:1", False), ("", True), ("divergence:1", True)]:
            rr.check(text)
            trained(begin=seed if wrong else without_buffers, steps=3)
        model = copy.deepcopy(UNTOUCHED)
        optimizer = rr.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=4)
        model(torch.ones(3, 4) * rr.rank()).sum().backward()
        optimizer.step()

    said = found(capsys, program, 2, settings=Settings())
    assert len(said) == 2, said
    assert re.search("parameter '2.weight' differs", said[0]), said
    assert said[1] == (
        "check=divergence: parameters of a LocalSGD differ between two averages, as they should; the averages are "
        "compared"
    )


def plateau(step, model, optimizer):
    """A scheduler that looks at the rank's own loss."""
    optimizer.scheduler = getattr(optimizer, "scheduler", None) or torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=12
    )
    optimizer.step()
    optimizer.scheduler.step(1.0 if rr.rank() == 1 else 1 / (1 + step))
    return "a step"


def momentum(step, model, optimizer):
    if step == 9 and rr.rank() > 1:
        optimizer.param_groups[0]["betas"] = (0.8, 0.999)


BATCH_NORM = r"buffer '1.running_mean' differs"
CASES |= {
    "a learning rate by a rank's own loss": (
        trains(plateau, without_buffers),
        [
            r"after 16 steps \(equal after 12\) value 'lr' differs: rank 1 has 0.005, ranks 0,2-3 have 0.01; the other "
            r"\d do not. If it steers training, .* all ranks must decide it alike: a scheduler",
            r"after 16 steps \(equal after 12\) parameter '0.weight' differs: rank 1 .* Value 'lr' has differed since",
        ],
    ),
    "an option": (
        trains(momentum, without_buffers),
        [r"value 'betas.0' differs: ranks 0-1 have 0.9, ranks 2-3 have 0.8", "parameter '0.weight' .*'betas.0'"],
    ),
    "buffers, then a parameter": (
        trains(flips, lambda model: None),
        [BATCH_NORM, r"after 16 steps \(equal after 12\) parameter '2.bias' differs: rank 2 from ranks 0-1,3"],
    ),
}


class Own(Sgd):
    """It keeps more than its parameters."""

    def __init__(self, params, **attributes):
        super().__init__(params)
        self.rate, self.steps = 0.1, 0
        vars(self).update(attributes)

    def step(self, grads):
        for name, grad in grads.items():
            self.params[name] -= self.rate * grad
        self.steps += 1


def own(every_step, steps=30, check="divergence:1", wrap=rr.DistributedOptimizer, **attributes):
    """A program that trains two parameters; every_step(step, params, optimizer) interferes after each step."""

    def program():
        params = {"a": np.arange(3.0), "b": np.array(2.0)}
        mine = {name: value(rr.rank()) for name, value in attributes.items()}
        optimizer = wrap(lambda params: Own(params, **mine), params)
        for step in range(steps):
            optimizer.step({name: np.sin(each + step + rr.rank()) for name, each in params.items()})
            every_step(step, params, getattr(optimizer, "optimizer", optimizer))

    return program, 3, Settings(check=check, stall_check_s=0)


def distributed(make, params):
    return rr.DistributedOptimizer(make(params))


def wrong_at(step, rank, name="a"):
    def change(at, params, optimizer):
        if (at, rr.rank()) == (step, rank):
            params[name] += 1

    return change


class Odd:
    """Has a shape, and is no array."""

    shape = (2,)


def grows(step, params, optimizer):
    """The tree of attributes has a new array now and then, one of them on one rank only."""
    setattr(optimizer, f"new{step % 7}", np.ones(step))
    if step == 4 and rr.rank() == 2:
        optimizer.lonely = np.ones(2)
    if step == 9:
        optimizer.params["a.b"], optimizer.a = np.ones(1), {"b": np.zeros(2)}
        optimizer.params.update({"x.y": np.ones(1), "x": np.ones(1)})


def broadcast_later(step, params, optimizer):
    if step == 5:
        rr.broadcast_parameters({"data": optimizer.data})
    wrong_at(20, 1, name="a")(step, params, optimizer)
    if step == 20 and rr.rank() == 1:
        optimizer.data += 1


def of_numpy(step, params, optimizer):
    if step == 12 and rr.rank() == 0:
        optimizer.rate = 0.01


CASES |= {
    "its data, then a parameter": (
        own(wrong_at(8, 1), data=lambda rank: np.full(4, float(rank)), check="divergence:5", wrap=distributed),
        [
            r"after 0 steps \(not compared before\) parameter 'data' differs: each of ranks 0-2 has its own",
            r"after 10 steps \(equal after 5\) parameter 'params.a' differs: rank 1 from ranks 0,2",
        ],
    ),
    "its data, of which ranks have more or less, of no floats": (
        own(wrong_at(8, 1), data=lambda rank: np.arange(rank + 2), seed=lambda rank: 40 + rank, wrap=distributed),
        [
            "value 'seed' differs: rank 0 has 40, rank 1 has 41, rank 2 has 42; the other 2 do not",
            "parameter 'data'",
            r"after 9 steps \(equal after 8\) parameter 'params.a' differs: rank 1",
        ],
    ),
    "a number": (
        own(of_numpy, wrap=distributed),
        [
            r"after 13 steps \(equal after 12\) value 'rate' differs: rank 0 has 0.01, ranks 1-2 have 0.1",
            r"parameter 'params.a' differs: rank 0 from ranks 1-2; so do 1 more of 2: 'params.b'. All ranks took",
        ],
    ),
    "a parameter of one element": (own(wrong_at(8, 1, "b"), wrap=distributed), ["after 9 steps .*'params.b' differs"]),
    "equal again, and not any more": (
        own(broadcast_later, data=lambda rank: np.full(4, float(rank)), wrap=distributed),
        ["'data' differs", r"after 21 steps \(equal after 20\) .*'data' differs: .*; so do 1 more of 3: 'params.a'"],
    ),
    "a tree that changes": (own(grows, wrap=distributed), ["'lonely' differs: rank 2 from ranks 0-1"]),
    "odd attributes": (
        own(
            wrong_at(8, 1),
            wrap=distributed,
            odd=lambda rank: [Odd(), np.array(["a"]), np.ma.masked_array([1], [True]), np.ones(3, object), 1 << 20000],
            text=lambda rank: f"rank {rank}",
            twice=lambda rank: {"a.b": 1.0, "a": {"b": 2.0}},
        ),
        ["4 of an optimizer's arrays cannot be compared; the first is 'odd.0': a .*Odd is not an array", "'params.a'"],
    ),
    "sharded": (
        own(of_numpy, wrap=rr.ShardedOptimizer, velocity=lambda rank: np.ones(rank)),
        [r"after 13 steps \(equal after 12\) value 'rate' differs: rank 0 has 0.01, ranks 1-2 have 0.1"],
    ),
    "sharded, a parameter": (
        own(wrong_at(20, 2), wrap=rr.ShardedOptimizer),
        [r"after 21 steps .* parameter 'a' differs"],
    ),
}


def test_what_differs_anew_for_ever_is_reported_more_and_more_rarely(capsys):
    def new_one(step, params, optimizer):
        vars(optimizer)[f"at {step}"] = np.full(2, rr.rank())
        wrong_at(700, 1)(step, params, optimizer)

    program, _, settings = own(new_one, steps=1500, wrap=distributed)
    said = found(capsys, program, 2, settings=settings)
    assert len(said) < 30, len(said)
    assert any("'params.a'" in each for each in said), said


def odd_model():
    """Torch's own kinds of tensors, which a check of bytes cannot all read."""
    model = torch.nn.Linear(2, 2)
    buffers = {
        "sparse": torch.eye(3).to_sparse(),
        "float4": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        "meta": torch.ones(2, device="meta"),
        "truth": torch.tensor(True),
        "none": torch.ones(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }
    for name, each in buffers.items():
        model.register_buffer(name, each)
    model.lazy = torch.nn.LazyLinear(2)
    return model


def of_odd_tensors():
    model = odd_model()
    rr.broadcast_parameters([model.weight, model.bias])
    optimizer = rr.DistributedOptimizer(torch.optim.SGD([model.weight, model.bias], lr=0.1))
    for step in range(6):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model.turned += rr.rank() * (step == 2)


def part_of_a_model():
    """Its names are those that other parameters of the model have."""
    model = torch.nn.Module()
    model.weight, model.head = torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.nn.Linear(3, 1)
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    rr.broadcast_parameters(model.state_dict())
    named = [*model.head.named_parameters(), ("scale", model.scale)]
    optimizer = rr.DistributedOptimizer(torch.optim.SGD([each for _, each in named], lr=0.1), named)
    for step in range(4):
        (model.head(torch.ones(1, 3) * model.weight).sum() * model.scale).backward()
        optimizer.step()
        model.weight.data += rr.rank() * (step == 1)


def many():
    """Parameters of no module, each in a group."""
    parameters = [torch.nn.Parameter(torch.full((2,), 1.0 + rr.rank())) for _ in range(200)]
    optimizer = rr.DistributedOptimizer(torch.optim.SGD([{"params": [each]} for each in parameters], lr=0.1))
    for step in range(4):
        torch.stack(list(parameters)).square().sum().backward()
        optimizer.step()
        optimizer.param_groups[7]["lr"] -= 0.01 * rr.rank() * (step == 1)


def twins():
    """Two optimizers whose parameters have the same names and shapes, as twin critics do."""
    models = [torch.nn.Linear(3, 1) for _ in range(2)]
    rr.broadcast_parameters([each for model in models for each in model.state_dict().values()])
    optimizers = [rr.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1)) for each in models]
    for step in range(12):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        models[1].bias.data += rr.rank() * (step == 3)


def of_joined_ranks():
    """Rank 1 has less data."""
    params = {"a": np.ones(3), "rank": float(rr.rank())}
    optimizer = rr.DistributedOptimizer(Sgd(params))
    for step in range(9 if rr.rank() == 1 else 20):
        optimizer.step({"a": np.ones(3)})
        params["a"] += (rr.rank() == 2) * (step == 12)
    rr.join()


def adasum():
    model = torch.nn.Linear(3, 1)
    rr.broadcast_parameters(model.state_dict())
    optimizer = rr.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=rr.Adasum)
    for step in range(6):
        model(torch.ones(1, 3) * (1 + rr.rank())).sum().backward()
        optimizer.step()
        model.bias.data += (rr.rank() == 2) * (step == 3)


def local_steps():
    model = torch.nn.Linear(3, 1)
    rr.broadcast_parameters(model.state_dict())
    outer = lambda anchor, gradient, state: (anchor - gradient * (1 + (rr.rank() == 3)), state)  # noqa: E731
    optimizer = rr.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), sync_every=4, outer=outer)
    for _ in range(16):
        model(torch.ones(1, 3) * (1 + rr.rank())).sum().backward()
        optimizer.step()


class Unreadable(dict):
    """A mapping that cannot be gone through on one rank."""

    def __iter__(self):
        if rr.rank() == 1:
            raise OSError("gone")
        return super().__iter__()


def unreadable():
    optimizer = rr.DistributedOptimizer(Own({"a": np.ones(3)}, cache=Unreadable(b=1)))
    for _ in range(4):
        optimizer.step({"a": np.ones(3)})


def a_function():
    optimizer = rr.DistributedOptimizer(lambda grads: None)
    for _ in range(3):
        optimizer(np.ones(3))


FOUR = {
    of_odd_tensors: [
        "4 of an optimizer's arrays cannot be compared; the first is 'lazy.weight': Attempted to use an unin",
        r"after 3 steps \(equal after 2\) buffer 'turned' differs",
    ],
    part_of_a_model: [
        r"after 2 steps .* parameter 'weight \(2\)' differs: each of ranks 0-3 .*. No DistributedOptimizer has it"
    ],
    many: [
        r"'parameter.0' differs: .* its own; so do 199 more of 200: 'parameter.1'(, 'parameter.\d+'){2}, …. They",
        r"after 2 steps .* value 'lr of group 7' differs: rank 0 has 0.1, rank 1 has 0.09\d*, rank 2 has 0.08, …; the",
    ],
    twins: [r"after 4 steps \(equal after 3\) parameter 'parameter.1' differs"],
    of_joined_ranks: [
        r"value 'params.rank' differs: rank 0 has 0.0, rank 1 has 1.0, rank 2 has 2.0, …. If it steers",
        r"after 13 steps \(equal after 12\) parameter 'params.a' differs: rank 2 from ranks 0,3",
    ],
    adasum: [r"after 4 steps \(equal after 3\) parameter 'parameter.1' differs: rank 2 from ranks 0-1,3"],
    local_steps: ["differ between two averages", r"after \d+ steps .* parameter '.*' differs: rank 3 from ranks 0-2"],
    unreadable: [r"check=divergence ends: rank 1 cannot read what to compare: OSError\('gone'\)"],
    a_function: ["passes no parameters and has no arrays as attributes: nothing of it is compared"],
}


def test_the_model_of_parameters_that_are_in_none_is_not_looked_for_for_long(monkeypatch):
    looks = []
    monkeypatch.setattr(parts, "_above", lambda parameter: looks.append(parameter) or [])
    assert len(parts.Parts().of({torch.nn.Parameter(torch.ones(1)): str(each) for each in range(100)}, [])) == 100
    assert len(looks) == parts.MOST_LOOKS


OFTEN = Settings(check="divergence:1", stall_check_s=0)
CASES |= {program.__name__: ((program, 4, OFTEN), expected) for program, expected in FOUR.items()}


@pytest.mark.parametrize(("job", "expected"), CASES.values(), ids=CASES)
def test_who_differs_and_why_is_said_once_as_it_begins_and_no_job_ends(capsys, job, expected):
    program, size, settings = job
    said = found(capsys, program, size, settings)
    patterns = [expected] if isinstance(expected, str) else expected
    assert len(said) == len(patterns), said
    for one, pattern in zip(said, patterns, strict=True):
        assert re.search(pattern, one), one


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_of_long_doubles_the_values_are_compared_and_no_padding(dtype):
    values, others = (np.full(4, 1.5, dtype) / 7 for _ in range(2))
    padding = others.view(np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)[:, 10:]
    padding ^= 255  # as memory that another array has had
    mine, same = (parts_of({"a": each})[0] for each in (values, others))
    assert np.array_equal(mine.read(), same.read())
    others[3] = np.nextafter(others[3].real, dtype(0).real)
    assert not np.array_equal(mine.read(), same.read())


def test_what_ranks_train_is_compared_by_name_before_the_first_step_and_by_value_from_the_second_on(capsys):
    """Where variables are broadcast after the first: rank 1 has frozen one, so the gradients' names differ, too."""

    class Optimizer:
        pass

    def program():
        optimizer, named = Optimizer(), {"a": 1.0 + rr.rank(), "b": 2.0, "c": 3.0 + 2 * rr.rank()}
        compare_from_second_step(optimizer)
        ours = [part_of(name, lambda value=value: np.array(value), TRAINS) for name, value in named.items()]
        ours = [each for each in ours if each.name != "b" or rr.rank() != 1]
        for number in range(2):
            compare_parts(optimizer, rr.global_process_set, lambda: ours, [each.name for each in ours if number == 0])

    first, second = found(capsys, program, 3)
    assert re.search(
        r"after 0 steps .* parameter 'b' differs: rank 1 from ranks 0,2; .* On rank 1, 'b' is missing", first
    )
    assert re.search(r"after 1 step .not compared before. parameter 'a' differs: each of ranks 0-2 has its own", second)
