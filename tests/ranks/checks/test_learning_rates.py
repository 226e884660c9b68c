"""Learning rates that differ between ranks are warned of, once, without any flag; and no job is disturbed by it."""

import re

import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support import training
from tests.support.on_threads import known


def said_by(capsys, program, size=3, **options):
    """What is logged while this program runs."""
    run_ranks(size, program, **options)
    return capsys.readouterr().err.splitlines()


def trained(steps, change, wrap=hvd.DistributedOptimizer, groups=1, **options):
    """change(step, optimizer) interferes after each step, and is told this rank's loss."""
    model = training.make_model()
    parameters = list(model.parameters())
    size = -(-len(parameters) // groups)
    split = [{"params": parameters[at : at + size]} for at in range(0, len(parameters), size)]
    optimizer = wrap(torch.optim.SGD(split, lr=0.1), model.named_parameters(), **options)
    for step in range(steps):
        loss = training.loss_of(model, training.share(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        change(step, optimizer, loss.item())
    return optimizer


def plateau(averages):
    """A scheduler; only the loss of rank 1 falls."""
    schedulers = {}

    def change(step, optimizer, loss):
        if step == 0:
            schedulers[rr.rank()] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
        loss = 1 / (1 + step) if rr.rank() == 1 else 1.0
        schedulers[rr.rank()].step(hvd.allreduce(loss, name="loss") if averages else loss)

    return change


def at_step(when, value, rank=2, group=0):
    def change(step, optimizer, loss):
        if (step, rr.rank()) == (when, rank):
            optimizer.param_groups[group]["lr"] = value

    return change


OWN = "rank 1 has 0.1, ranks 0,2 have 0.01; so their"
DIFFERING = {
    "a plateau": (30, plateau(False), {}, rf"after \d steps the learning rate differs: {OWN} parameters drift apart"),
    "a plateau, Adasum": (12, plateau(False), {"op": hvd.Adasum}, "differs: rank 0 has 0.01, rank 1 has 0.1"),
    "a plateau, sharded": (30, plateau(False), {"wrap": hvd.ShardedOptimizer}, f"differs: {OWN}"),
    "averaged": (30, plateau(True), {}, None),
    "each rank's own": (
        120,
        lambda step, optimizer, loss: optimizer.param_groups[0].update(lr=0.1 / (1 + rr.rank() + step)),
        {},
        "rank 0 has 0.1, rank 1 has 0.05, rank 2 has 0.0333333; ",
    ),
    "a group": (20, at_step(7, 0.5, group=1), {"groups": 2}, "of group 1 differs: rank 2 has 0.5, ranks 0-1 have 0.1"),
    "later": (200, at_step(120, 0.5), {}, r"after 1[2-6]\d steps .* rank 2 has 0.5"),
    "after the last look": (12, at_step(11, 0.5), {}, None),
    "a last bit": (40, at_step(7, 0.1 * (1 + 1e-12)), {}, None),
    "a tensor": (20, at_step(7, torch.tensor(0.25)), {}, "rank 2 has 0.25"),
}


@pytest.mark.parametrize(("steps", "change", "options", "expected"), DIFFERING.values(), ids=DIFFERING)
def test_learning_rates_that_differ_are_said_once(capsys, steps, change, options, expected):
    size = 2 if options.get("op") is hvd.Adasum else 3
    said = said_by(capsys, lambda: trained(steps, change, **options), size)
    assert len(said) == (expected is not None), said
    assert expected is None or re.search(expected, said[0]), said


def cosine(step):
    return 0.05 * (1 + torch.tensor(step / 9.0).cos().item())


def joins():
    """Rank 1 has less data, in the middle of a comparison or not."""
    for steps in (9, 10, 11):
        model, optimizer = training.wrapped()
        for step in range(steps if rr.rank() == 1 else 20):
            training.own_backward(model, step)
            optimizer.step()
        rr.join()


def ends():
    """Right after a comparison has begun."""
    trained(8, lambda *_: None)


def accumulates():
    model, optimizer = training.wrapped(backward_passes_per_step=2)
    for step in range(40):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step)
        with optimizer.no_sync():
            training.own_backward(model, 3 * step)
        for passed in (1, 2):
            training.own_backward(model, 3 * step + passed)
        optimizer.step()
        optimizer.zero_grad()


def adversaries():
    """Two optimizers, whose parameters have the same names, that step at different rates, and not in all iterations."""
    models = [training.make_model(seed) for seed in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1)) for each in models]
    for step in range(60):
        for which in [0, 0, 1] if step % 3 else [0]:
            training.own_backward(models[which], step)
            optimizers[which].step()
            optimizers[which].zero_grad()
            optimizers[which].param_groups[0]["lr"] = cosine(step) / (1 + which)


def sets_after_a_look():
    """The next learning rate is set when some ranks have looked at their gradients, and others not yet."""
    model, optimizer = training.wrapped()
    for step in range(40):
        training.own_backward(model, step)
        if step % 3 == rr.rank():
            training.clip(model)
        optimizer.param_groups[0]["lr"] = cosine(step)
        optimizer.step()
        optimizer.zero_grad()


def of_process_sets():
    """Each has its own."""
    of_set = known([0, 2], 1) if rr.rank() != 1 else known([1], 2)
    model, optimizer = training.wrapped(process_set=of_set, lr=0.1 * (1 + rr.rank() % 2))
    for step in range(20):
        training.own_backward(model, step)
        optimizer.step()


def skips():
    """Rank 1 sometimes does not step."""
    model, optimizer = training.wrapped()
    for step in range(40):
        training.own_backward(model, step)
        optimizer.synchronize()
        if rr.rank() != 1 or step % 5 != 4:
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()


class Odd(torch.optim.SGD):
    """Keeps anything as a learning rate."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.1
        super().step(closure)
        for number, group in enumerate(self.param_groups):
            group["lr"] = ["auto", None, torch.ones(2), float("nan"), 1j, (0.1, 0.2)][number + rr.rank()]
            if number == 3:
                del group["lr"]


def odd():
    model = training.make_model()
    groups = [{"params": [each]} for each in model.parameters()]
    optimizer = hvd.DistributedOptimizer(Odd(groups, lr=0.1), model.named_parameters())
    for step in range(12):
        training.own_backward(model, step)
        optimizer.step()


def has_more_groups():
    """Rank 0 has one more, without a parameter, so its comparisons do not fit."""
    model, optimizer = training.wrapped()
    if rr.rank() == 0:
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": []})
    for step in range(20):
        training.own_backward(model, step)
        optimizer.step()


QUIET = [joins, ends, accumulates, adversaries, sets_after_a_look, of_process_sets, skips, odd, has_more_groups]


@pytest.mark.parametrize("program", QUIET, ids=lambda each: each.__name__)
def test_no_job_is_disturbed(capsys, program):
    sets = [[0, 2], [1]] if program is of_process_sets else ()
    assert said_by(capsys, program, process_sets=sets, settings=Settings(stall_check_s=2)) == []


def test_a_rank_alone_compares_nothing(capsys):
    assert said_by(capsys, lambda: trained(20, plateau(False)), 1) == []


def test_in_a_process_set_the_ranks_of_the_world_are_named(capsys):
    def program():
        if rr.rank():
            trained(20, at_step(7, 0.5), process_set=known([1, 2], 1))

    [said] = said_by(capsys, program, process_sets=[[1, 2]])
    assert "differs: rank 1 has 0.1, rank 2 has 0.5; " in said
