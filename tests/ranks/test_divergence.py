"""check=divergence: each cause is named, with rank, parameter and step; and ranks that are alike are left alone."""

import copy
import re

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks

EVERY = 10
SETTINGS = Settings(check=f"divergence:{EVERY}", stall_check_s=0)
UNTOUCHED = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
HALF_BUILT = torch.nn.Linear.__new__(torch.nn.Linear)  # such a one is met where another thread is building a model


def trained(change=lambda step, model, optimizer: None, begin=lambda model: None, steps=60):
    """Train on each rank's own data, in which `change` interferes, and may say that the step is not made."""
    model = copy.deepcopy(UNTOUCHED)
    begin(model)
    named = [(name, each) for name, each in model.named_parameters() if name != "own"]
    optimizer = rr.DistributedOptimizer(torch.optim.Adam([each for _, each in named], lr=0.01), named)
    for step in range(steps):
        optimizer.zero_grad()
        data = torch.arange(20.0).reshape(5, 4).sin() + rr.rank() / 10 + step / 100
        model(data).square().mean().backward()
        if change(step, model, optimizer) is None:
            optimizer.step()


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
    if step == 37 and rr.rank() == 1:
        return "no step"
    with optimizer.skip_synchronize():
        optimizer.step()
    return "a step"


def reads_and_skips(step, model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return "no step" if step == 37 and rr.rank() == 1 else None


def flips(step, model, optimizer):
    if step == 37 and rr.rank() == 2:
        model[2].bias.data.view(torch.int32)[1] ^= 1 << 12  # one that later steps do not round away


CASES = {
    "equal": (lambda *_: None, without_buffers, None),
    "seed": (
        lambda *_: None,
        seed,
        r"after 0 steps \(not compared before\) parameter '2.weight' differs: rank 1 from ranks 0,2-3; the other 3 do "
        r"not. They were never found equal: call broadcast_parameters",
    ),
    "frozen": (
        lambda *_: None,
        frozen,
        r"after 0 steps .* '0.bias' differs: rank 2 from ranks 0-1,3; .* On rank 2, '0.bias' is frozen",
    ),
    "not passed to the optimizer": (
        lambda *_: None,
        elsewhere,
        r"after 0 steps .* 'own' differs: ranks 0-1 from ranks 2-3; the other 4 do not. No DistributedOptimizer has it",
    ),
    "skipped": (
        skips,
        without_buffers,
        r"after 40 steps \(equal after 30\) parameter '0.weight' differs: rank 1 from ranks 0,2-3; so do 3 more of 4: "
        r"'0.bias', '2.weight', '2.bias'. rank 1 took 39 steps, ranks 0,2-3 40",
    ),
    "read, and skipped": (reads_and_skips, without_buffers, r"after 40 steps .* rank 1 took 39 steps, ranks 0,2-3"),
    "BatchNorm": (
        lambda *_: None,
        lambda model: None,
        r"after 0 steps .* buffer '1.running_mean' differs: each of ranks 0-3 has its own; .*SyncBatchNorm",
    ),
    "a bit": (
        flips,
        without_buffers,
        r"after 40 steps \(equal after 30\) parameter '2.bias' differs: rank 2 from ranks 0-1,3; the other 3 do not. "
        r"All ranks took the same number of steps, with equal gradients: something else has changed it",
    ),
}


def found(capsys, program, size=4, timeout_s=20.0, settings=SETTINGS):
    """What the check says while this program runs."""
    run_ranks(size, program, settings=settings, timeout_s=timeout_s)
    return [each.removeprefix("ringreduce: ") for each in capsys.readouterr().err.splitlines() if "check=" in each]


@pytest.mark.parametrize(("change", "begin", "expected"), CASES.values(), ids=CASES)
def test_who_differs_and_why_is_named(capsys, change, begin, expected):
    def program():
        try:
            trained(change, begin)
        except rr.CollectiveError:  # that rank takes no part in the reduction, as without the check
            assert begin is frozen

    said = found(capsys, program, timeout_s=2 if begin is frozen else 20)
    assert len(said) == (expected is not None), said
    assert expected is None or re.search(expected, said[0]), said


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
        "check=divergence: parameters of a LocalSGD differ between two averages, as they should; they are not compared"
    )
