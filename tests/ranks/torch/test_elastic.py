"""hvd.elastic for torch on threads that are ranks: what Horovod's own tests check, and what they do not."""

import copy
import sys
import threading

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import ringreduce.torch as hvd
from ringreduce import runtime
from ringreduce.arrays.libraries import LIBRARIES
from ringreduce.elastic.commit import Restoration
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of


def model_of(value):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for parameter in model.parameters():
        parameter.data.fill_(value)
    return model


def weights(model):
    return [each.clone() for each in model.state_dict().values()]


def assert_equal(one, other):
    for left, right in zip(one, other, strict=True):
        assert torch.equal(left, right)


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 2, generator=generator)).square().mean().backward()
        optimizer.step()


def trained_alone():
    """The weights after four steps of one process."""
    model = model_of(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        train(model, optimizer, 1, seed=step)
    return weights(model)


def test_the_names_are_horovods_and_need_no_import_of_their_own():
    assert hvd.elastic is sys.modules["ringreduce.torch.elastic"]
    for name in ("ElasticSampler", "ObjectState", "State", "TorchState", "run"):
        assert name in hvd.elastic.__all__
        assert callable(getattr(hvd.elastic, name))
    assert issubclass(hvd.elastic.ElasticSampler, torch.utils.data.Sampler)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
}


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "DistributedOptimizer"])
@pytest.mark.parametrize("committed_after", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
@each_rank_of(2)
def test_training_goes_on_from_a_commit_as_it_went_on_the_first_time(name, committed_after, wrapped):
    """To the last bit; before an optimizer has any state, too; twice, since a step changes what it has in place."""
    model = model_of(1.0)
    optimizer = OPTIMIZERS[name](model.parameters())
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, batch=0)
    train(model, optimizer, committed_after)
    state.commit()
    results = []
    for _ in range(3):
        train(model, optimizer, 3, seed=hvd.rank())
        scheduler.step()
        results.append((weights(model), copy.deepcopy(optimizer.state_dict()), scheduler.state_dict()))
        state.restore()
    for after, of_optimizer, of_scheduler in results[1:]:
        assert_equal(after, results[0][0])
        assert str(of_optimizer) == str(results[0][1])
        assert of_scheduler == results[0][2]
    assert scheduler.optimizer is optimizer


@pytest.mark.parametrize(("is_lost", "began"), [(True, [0, 1]), (False, [0, 2])], ids=["lost", "told"])
def test_ranks_that_change_between_commits_of_a_sharded_optimizer(elastic, is_lost, began):
    """Ranks of which some are gone cannot gather its state, and go back; else it is gathered, and goes on."""

    def program():
        model, begins, changes = model_of(1.0), [], [True]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.ShardedOptimizer(optimizer, model.named_parameters())
        state = hvd.elastic.TorchState(model, optimizer, step=0)
        changed = [False]
        runtime.current("a test").membership_changed = lambda: changed[0]

        @hvd.elastic.run
        def training(state):
            changed[0] = False
            begins.append(state.step)
            while state.step < 4:
                train(model, optimizer, 1, seed=state.step)
                state.step += 1
                if state.step == 2 and changes and changes.pop():
                    changed[0] = is_lost
                    state.on_hosts_updated(1, 2)
                    state.check_host_updates()
                state.commit()
            return weights(model)

        assert_equal(training(state), weights(model))
        assert begins == began
        return weights(model)

    expected = trained_alone()
    for result in run_ranks(2, program):
        torch.testing.assert_close(result, expected)


def as_it_is(optimizer):
    return optimizer


def in_a_list(optimizer):
    return {"others": [optimizer]}


@pytest.mark.filterwarnings("ignore:this SGD is a copy")  # that in the commit
@pytest.mark.parametrize(
    ("wrap", "put"),
    [(hvd.DistributedOptimizer, as_it_is), (hvd.ShardedOptimizer, as_it_is), (hvd.DistributedOptimizer, in_a_list)],
)
def test_what_was_being_reduced_is_given_up(elastic, wrap, put):
    """One rank leaves off in the middle of a step, the other in its end; the gradients of that step are gone."""

    def program():
        model = model_of(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = wrap(optimizer, model.named_parameters())
        state = hvd.elastic.TorchState(model, put(optimizer), step=0)
        failures = [hvd.PeerLostError("rank 9 died", [9])]

        @hvd.elastic.run
        def training(state):
            while state.step < 4:
                generator = torch.Generator().manual_seed(state.step)
                model(torch.randn(4, 2, generator=generator)).square().mean().backward()
                if failures and state.step == 2:
                    raise failures.pop()
                optimizer.step()
                optimizer.zero_grad()
                state.step += 1
                state.commit()
            return weights(model)

        return training(state)

    expected = trained_alone()
    for result in run_ranks(2, program):
        torch.testing.assert_close(result, expected)
    assert elastic == [[3, 3]]


@pytest.mark.parametrize("done", ["unscaled", "stepped"])
@each_rank_of(2)
def test_a_scaler_s_step_that_was_broken_off_is_none(done):
    """torch refuses to unscale gradients twice, or after a step, until update()."""
    model, scaler = model_of(1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model, optimizer, scalers=[scaler])
    state.restore()
    for broken_off in (True, False):
        scaler.scale(model(torch.ones(2, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        assert model[1].bias.grad.tolist() == [2, 2]
        if done == "stepped" or not broken_off:
            scaler.step(optimizer)
        if broken_off:
            state.restore()
    scaler.update()
    assert scaler.get_scale() == 4.0


@each_rank_of(2)
def test_an_optimizer_with_state_gives_it_to_one_without():
    """As to a rank that comes late."""
    model = model_of(1.0 + hvd.rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, extra=torch.ones(2) * hvd.rank())
    if hvd.rank() == 0:
        train(model, optimizer, 2)
    state.sync()
    train(model, optimizer, 1)
    assert state.extra.tolist() == [0, 0]
    return torch.cat([each.reshape(-1) for each in weights(model)])


@pytest.mark.filterwarnings("ignore:.*deprecated")  # quantized tensors
@pytest.mark.parametrize("kind", ["sparse", "quantized", "meta"])
@each_rank_of(2)
def test_a_tensor_that_is_pickled_comes_to_ranks_that_have_none_or_another(kind):
    dense = torch.eye(2)
    value = {
        "sparse": dense.to_sparse(),
        "quantized": torch.quantize_per_tensor(dense, 0.5, 0, torch.quint8),
        "meta": dense.to("meta"),
    }[kind]
    is_root = hvd.rank() == 0
    state = hvd.elastic.TorchState(none=value if is_root else None, other=value if is_root else torch.zeros(2, 2))
    state.sync()
    for each in (state.none, state.other):
        assert (each.layout, each.dtype, each.device) == (value.layout, value.dtype, value.device)
        assert kind == "meta" or torch.equal((each.dequantize() if kind == "quantized" else each).to_dense(), dense)


def test_state_of_gpus_comes_to_them_on_a_rank_that_has_none(monkeypatch):
    """By tensors of torch's that have a device but no elements; a rank without a GPU has it on the host."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *both: torch.ops.aten.copy_(*both))  # it wants a real device

    class Average:
        def __init__(self, of):
            self.mean = of.clone()

    def program():
        with FakeTensorMode(allow_non_fake_inputs=True):
            parameters = [torch.nn.Parameter(torch.ones(3, device=f"cuda:{number}")) for number in (0, 1)]
            optimizer, extra = torch.optim.Adam(parameters, foreach=False), None
            if hvd.rank() == 0:
                for each in parameters:
                    each.grad = each.detach().clone()
                optimizer.step()
                extra = torch.ones(4, device="cuda")
            state = hvd.elastic.TorchState(optimizer=optimizer, extra=extra, average=Average(parameters[0].detach()))
            state.sync()
            state.restore()
            of_parameters = [{key: str(value.device) for key, value in of.items()} for of in optimizer.state.values()]
            return of_parameters, str(state.extra.device), str(state.average.mean.device)

    expected = [{"step": "cpu", "exp_avg": gpu, "exp_avg_sq": gpu} for gpu in ("cuda:0", "cuda:1")]
    assert run_ranks(2, program) == [(expected, "cuda:0", "cuda:0")] * 2
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    saved = LIBRARIES["torch"].room(np.zeros(4, np.uint8), torch.float32, (1,), ("cuda", False, False))
    assert Restoration().put_back(None, saved).device.type == "cpu"


def test_dropout_of_each_rank_is_its_own_and_comes_again_after_a_loss():
    """Ranks are threads, and torch has one generator for all of them."""
    one_at_a_time = threading.Lock()

    def program():
        state = hvd.elastic.TorchState(rng=torch.Generator().manual_seed(hvd.rank()).get_state(), local=("rng",))

        def mask():
            with one_at_a_time, torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state.rng)
                drawn = torch.nn.functional.dropout(torch.ones(64))
                state.rng = torch.get_rng_state()
            return drawn

        state.sync()
        first = mask()
        state.commit()
        second = mask()
        state.restore()
        assert torch.equal(mask(), second)
        return first, second

    masks = [tuple(mask.tolist()) for masks in run_ranks(2, program) for mask in masks]
    assert len(set(masks)) == 4


@each_rank_of(2)
def test_an_optimizer_of_other_parameters_is_refused():
    parameters = list(model_of(1.0).parameters())[: 4 - hvd.rank()]
    state = hvd.elastic.TorchState(optimizer=torch.optim.SGD(parameters, lr=0.1))
    if hvd.rank() == 0:
        state.sync()
        return
    with pytest.raises(
        hvd.InputError, match=r"no parameter 'group.0.parameter.3' of shape \(2,\), which the last commit"
    ):
        state.sync()


def test_a_sampler_is_part_of_the_state():
    """As Horovod's test of ElasticSampler."""

    def program():
        batch_size, per_rank = 2, 8
        dataset = torch.utils.data.TensorDataset(torch.arange(per_rank * hvd.size()))
        sampler = hvd.elastic.ElasticSampler(dataset, shuffle=False)
        loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=sampler)
        state = hvd.elastic.TorchState(sampler=sampler)
        state.sync()
        assert (state.sampler.epoch, sampler.processed_num) == (0, 0)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch, (items,) in enumerate(loader):
                assert sampler.get_indices(batch, batch_size) == items.tolist()
                sampler.record_batch(batch, batch_size)
                assert sampler.processed_num == batch_size * (batch + 1) * hvd.size()
            assert batch + 1 == per_rank / batch_size
        assert len(list(loader)) == 4, "what was recorded comes again, since the epoch was not set"
        sampler.set_epoch(2)
        sampler.record_batch(0, batch_size)
        sampler.record_batch(1, batch_size)
        state.commit()
        sampler.record_batch(2, batch_size)
        sampler.record_batch(3, batch_size)
        state.restore()
        assert sampler.processed_num == 2 * batch_size * hvd.size()
        return [int(item) for (items,) in loader for item in items]

    assert run_ranks(1, program) == [[4, 5, 6, 7]]
    assert run_ranks(2, program) == [[8, 10, 12, 14], [9, 11, 13, 15]]


REPLACED = {"model first": ["model", "optimizer"], "optimizer first": ["optimizer", "model"], "one": ["model"]}


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize("order", REPLACED.values(), ids=REPLACED)
@each_rank_of(2)
def test_a_model_or_an_optimizer_that_is_replaced_is_committed_at_once(order, synced):
    """As in Horovod; the other attributes stay as they were committed."""

    def made(value):
        model = model_of(value)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)}

    state = hvd.elastic.TorchState(**made(1.0), epoch=1, items=[hvd.rank()])
    if synced:
        state.sync()
    commits, items = state.commits, list(state.items)
    other = made(2.0 + hvd.rank())
    state.epoch = 2
    state.items.append(3)
    for name in order:
        setattr(state, name, other[name])
    expected = weights(other["model"])
    train(other["model"], other["optimizer"], 2)
    other["optimizer"].param_groups[0]["lr"] = 0.0
    state.restore()
    assert state.model is other["model"]
    assert_equal(weights(state.model), expected)
    assert (state.epoch, state.items) == (1, items)
    assert state.optimizer.param_groups[0]["lr"] == (2.0 + hvd.rank() if "optimizer" in order else 1.0)
    assert state.commits == (commits + len(order) if synced else 0)


def test_state_without_a_job_is_like_any_other():
    """A script run alone, before init(): nothing is communicated."""
    model = model_of(2.0)
    state = hvd.elastic.TorchState(model=model, epoch=1)
    model[0].weight.data.zero_()
    state.restore()
    assert torch.equal(model[0].weight, torch.full((2, 2), 2.0))
