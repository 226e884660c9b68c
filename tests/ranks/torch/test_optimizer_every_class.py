"""Every optimizer of torch.optim, wrapped: training on shares equals training on everything, with all its flags."""

import inspect

import pytest
import torch

import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support import training

CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
IN_THEIR_OWN_WAY = {"LBFGS", "Muon", "SparseAdam"}
FLAGS = {
    "Adam": [{"foreach": True}, {"fused": True}, {"lr": torch.tensor(0.01)}, {"amsgrad": True, "capturable": False}],
    "AdamW": [{"fused": True}, {"foreach": False}],
    "SGD": [{"fused": True}, {"momentum": 0.9, "nesterov": True, "foreach": True}, {"maximize": True}],
    "Adagrad": [{"fused": True}],
    "RMSprop": [{"centered": True, "momentum": 0.5}],
    "RAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
}
CASES = [(name, {}) for name in CLASSES if name not in IN_THEIR_OWN_WAY]
CASES += [(name, flags) for name, each in FLAGS.items() for flags in each]


@pytest.mark.parametrize(("name", "flags"), CASES, ids=str)
def test_shares_equal_everything(name, flags):
    def program(data, wrapped):
        model = training.make_model()
        optimizer = wrapped(CLASSES[name](model.parameters(), **{"lr": 0.01, **flags}), model)
        result = training.trained(
            model, optimizer, 5, lambda model, step: training.loss_of(model, data(step)).backward()
        )
        assert not torch.allclose(result, training.parameters(training.make_model()))
        return result

    kinds = [hvd.DistributedOptimizer, *[hvd.ShardedOptimizer] * (name != "Adafactor")]
    training.trains_as_one_process(3, program, kinds)


def test_muon():
    def program(data, wrapping):
        weight = torch.nn.Parameter(torch.arange(15.0, dtype=torch.float64).reshape(3, 5) / 10)
        optimizer = torch.optim.Muon([weight], lr=0.01)
        if wrapping:
            optimizer = hvd.DistributedOptimizer(optimizer, [("weight", weight)])
        for step in range(4):
            optimizer.zero_grad()
            (data(step) @ weight.T - 1).square().mean().backward()
            optimizer.step()
        return weight.detach()

    result = training.same_on_all(run_ranks(2, lambda: program(training.share, True)))
    # its orthogonalisation is made in bfloat16
    torch.testing.assert_close(result, program(training.batch, False), rtol=1e-2, atol=1e-2)


LOSSES = {
    "its own": lambda loss: loss,
    "a number": lambda loss: loss.item(),
    "averaged by the user": lambda loss: hvd.allreduce(loss.detach()),
}


@pytest.mark.parametrize("returned", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("options", [{"line_search_fn": "strong_wolfe"}, {"tolerance_change": 1e-3}], ids=str)
def test_lbfgs_decides_by_the_loss_of_all_ranks(options, returned):
    """Whatever its closure returns of this rank's; a class that derives from it, too."""
    kind = type("MyLBFGS", (torch.optim.LBFGS,), {})

    def program(data, wrapping, scale=1):
        model = training.make_model()
        optimizer = kind(model.parameters(), max_iter=9, **options)
        if wrapping:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **wrapping)

        def closure():
            optimizer.zero_grad()
            loss = training.loss_of(model, data(0)) * scale
            loss.backward()
            return returned(loss) if wrapping else loss

        for _ in range(2):
            optimizer.step(closure)
        return training.parameters(model)

    for op, scale in ((hvd.Average, 1), (hvd.Sum, 2)) if returned is LOSSES["its own"] else ((hvd.Average, 1),):
        result = training.same_on_all(run_ranks(2, lambda: program(training.share, {"op": op})))  # noqa: B023
        torch.testing.assert_close(result, program(training.batch, None, scale), rtol=1e-6, atol=1e-8)


def test_another_optimizers_closure_returns_the_ranks_own_loss():
    def program():
        model = training.make_model()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

        def closure():
            optimizer.zero_grad()
            training.loss_of(model, training.share(0)).backward()
            return float(hvd.rank())

        return optimizer.step(closure)

    assert run_ranks(2, program) == [0.0, 1.0]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad makes a sparse tensor so
@pytest.mark.parametrize("kind", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_gradients(kind):
    """Rank r looks up other rows, so every rank's gradient has other ones."""

    def program(ids, wrapping):
        table = torch.nn.Embedding(10, 3, sparse=True).double()
        table.weight.data = torch.arange(30.0, dtype=torch.float64).reshape(10, 3) / 10
        optimizer = CLASSES[kind](table.parameters(), lr=0.1)
        if wrapping:
            optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            table((ids + step) % 10).square().mean().backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
        return table.weight.detach()

    ids = torch.tensor([0, 1, 1, 5, 2, 0])
    result = training.same_on_all(run_ranks(3, lambda: program(ids[hvd.rank() :: 3], True)))
    torch.testing.assert_close(result, program(ids, False), rtol=1e-9, atol=1e-12)
