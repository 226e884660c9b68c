"""What Horovod's scripts find on a wrapped optimizer, and what happens to one that is copied or outlives its world."""

import copy
import io
import pickle
import warnings

import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support import training
from tests.support.on_threads import each_rank_of

CAUTIOUS = True  # see conftest.py


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@each_rank_of(2)
def test_gradients_are_zeros_once_the_optimizer_is_wrapped(op):
    """A look concerns this rank alone until backward() has come."""
    model = training.make_model()
    model[2].bias.requires_grad_(False)
    model.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    optimizer = training.wrap(model, op=op)
    assert model[2].bias.grad is None
    for parameter in (model[0].weight, model[0].bias, model.scale):
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
    if hvd.rank() == 1:
        assert torch.equal(model[0].bias.grad, torch.zeros(16, dtype=torch.float64))
        model[0].weight.grad.add_(3.0)
        assert model[0].weight.grad.sum() == 240
    hvd.broadcast(model[0].weight.grad, 0, name="weight")
    hvd.broadcast_(model[2].weight.grad, 0, name="in place")
    assert torch.equal(model[2].weight.grad, torch.zeros(3, 16, dtype=torch.float64))
    del optimizer
    again = training.wrap(model, op=op)
    assert not model[0].bias.grad.any()
    assert not again.param_groups[0]["params"][2].grad.any()


@each_rank_of(2)
def test_a_hook_that_looks_at_the_first_gradient_finds_it_in_the_zeros():
    """It was there before the optimizer was wrapped, and no zero_grad() has come."""
    model, seen = training.make_model(), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: seen.append(float(each.grad.abs().sum())))
    optimizer, before = training.wrap(model), training.parameters(model)
    training.own_backward(model, 0)
    optimizer.step()
    assert all(seen)
    assert (training.parameters(model) != before).all()


UNUSED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
}


@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_the_zeros_change_nothing_when_no_zero_grad_comes_first(kind, looking):
    def program(data, wrapped):
        model = training.make_model()
        optimizer = wrapped(UNUSED[kind](model.parameters()), model)
        if looking and data is training.share:
            assert all(not parameter.grad.any() for parameter in model.parameters())
        for step in range(3):
            training.loss_of(model, data(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return training.parameters(model)

    training.trains_as_one_process(2, program)


@pytest.mark.parametrize("clearing", ["nothing", "none", "zero"])
def test_the_zeros_leave_sparse_gradients_sparse(clearing):
    def program(wrapping, ranks):
        table = torch.nn.Embedding(6, 3, sparse=True).double()
        table.weight.data = torch.arange(18.0, dtype=torch.float64).reshape(6, 3)
        optimizer = UNUSED["SparseAdam"](table.parameters())
        if wrapping:
            optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters())
        if clearing != "nothing":
            optimizer.zero_grad(set_to_none=clearing == "none")
        for rank in ranks():
            if rank == 0:  # the other has no gradient
                (table(torch.tensor([1, 4])).square().sum() / (1 if wrapping else 2)).backward()
        optimizer.step()
        return table.weight.detach()

    found = training.same_on_all(run_ranks(2, lambda: program(True, lambda: [hvd.rank()])))
    rows = torch.tensor([1, 4])  # SparseAdam's first step is lr times the sign
    training.close(found[rows], program(False, lambda: range(2))[rows])


def test_in_no_sync_the_zeros_give_way_to_this_ranks_gradient():
    def program():
        table = torch.nn.Embedding(6, 3, sparse=True).double()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
        with optimizer.no_sync():
            with optimizer.no_sync():
                pass  # its end is not that of the outer one
            table(torch.tensor([hvd.rank()])).sum().backward()
        return table.weight.grad.to_dense().sum(1).tolist()  # a look that waits for nobody

    assert run_ranks(2, program) == [[3, 0, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0]]


COMPILED = torch.compile(backend="eager")


@pytest.mark.extended
def test_torch_compile_meets_the_zeros():
    """Nothing of Dynamo's falls over .grad of another class, and it does not warn of this package's code."""

    def program(data, wrapping, compiled=COMPILED):
        model = training.make_model()
        optimizer = training.wrap(model) if wrapping else torch.optim.SGD(model.parameters(), lr=0.1)

        @compiled
        def train(x):
            training.loss_of(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        for step in range(2):
            train(data(step))
        return training.parameters(model)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained = run_ranks(1, lambda: program(training.share, True))
    assert not [str(each.message) for each in seen if "Dynamo" in str(each.message)]
    training.close(training.same_on_all(trained), program(training.batch, False, lambda train: train))


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@each_rank_of(2)
def test_attributes_that_scripts_read_and_set(op):
    model, optimizer = training.wrapped(op=op)
    assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
    assert optimizer.backward_passes_per_step == 1
    optimizer.set_backward_passes_per_step(2)
    with pytest.raises(ValueError, match="backward_passes_per_step=0; expected a whole number of 1 or more"):
        optimizer.set_backward_passes_per_step(0)
    optimizer._requires_update = set()  # some do, of horovod#1099
    if op is not hvd.Adasum:
        for step in range(2):
            training.own_backward(model, step)
        optimizer.synchronize()
        assert optimizer._should_synchronize
        optimizer._should_synchronize = False
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        optimizer._should_synchronize = True
    return training.parameters(model)


def test_autograd_sees_what_the_lane_changes():
    def program():
        channel, weight = rr.ordered(), torch.ones(3, requires_grad=True)
        for _ in range(3):
            kept = torch.ones(3)
            loss = (weight * kept).sum()
            channel.broadcast_(kept, 0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    run_ranks(2, program)


@each_rank_of(1)
def test_step_after_synchronize_warns_in_horovods_words():
    model, optimizer = training.wrapped()
    training.own_backward(model, 0)
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)") as seen:
        optimizer.step()
    assert seen[0].filename == __file__


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
@each_rank_of(2)
def test_unsupported_arguments_are_caught_as_either_error(kind):
    for call in (
        lambda: hvd.reducescatter(torch.ones(4), op=hvd.Adasum),
        lambda: hvd.grouped_reducescatter([torch.ones(4)], op=hvd.Max),
        lambda: hvd.allreduce(torch.ones(4), average=True, op=hvd.Sum),
        lambda: hvd.allreduce(torch.ones(4, dtype=torch.int32), op=hvd.Adasum),
        lambda: hvd.allreduce(torch.ones(4, 2).t()[1:, ::2], op="sum"),
    ):
        with pytest.raises(kind):
            call()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (training.make_model(), r"expected a torch optimizer, got a Sequential; as in Distributed"),
        (
            type("Adam", (type("Base", (), {"__module__": "keras.src.optimizers"}),), {})(),
            r"for an optimizer of Keras 3 use ringreduce.keras.DistributedOptimizer; ",
        ),
    ],
)
@each_rank_of(1)
def test_what_is_no_torch_optimizer(wrong, message):
    with pytest.raises(TypeError, match=message):
        hvd.DistributedOptimizer(wrong)


def through_torch_save(optimizer):
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "save": through_torch_save,
}
WARNING = r"this SGD is a copy of a DistributedOptimizer. The copy does not reduce gradients; wrap it again"


def in_turn(act):
    """Warnings are the process's, and ranks are threads: one after the other."""
    for rank in range(hvd.size()):
        if rank == hvd.rank():
            act()
        hvd.barrier()


@pytest.mark.parametrize("how", COPIES)
@each_rank_of(2)
def test_a_copy_warns_until_it_is_wrapped_again(how):
    model, optimizer = training.wrapped(lr=0.25)

    def act():
        with pytest.warns(UserWarning, match=WARNING):
            copied = COPIES[how](optimizer)
        assert type(copied) is torch.optim.SGD
        assert copied.param_groups[0]["lr"] == 0.25
        with pytest.warns(UserWarning, match=WARNING):
            copied.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = hvd.DistributedOptimizer(copied)
        assert again.param_groups is copied.param_groups

    in_turn(act)
    both = []

    def copy_both():
        with pytest.warns(UserWarning, match=WARNING):
            both.extend(copy.deepcopy((model, optimizer)))

    in_turn(copy_both)
    model, copied = both
    copied = hvd.DistributedOptimizer(copied, model.named_parameters())
    training.own_backward(model, 0)
    copied.step()
    return training.parameters(model)


@each_rank_of(1)
def test_a_copy_of_one_rank_says_nothing():
    optimizer = training.wrap(training.make_model())
    for make in COPIES.values():
        make(optimizer).step()


@pytest.mark.parametrize(
    "options", [{}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Adasum}, {"groups": 2}], ids=str
)
def test_an_optimizer_goes_by_the_world_there_is(options):
    """One rank, then two, then one: as after shutdown() and init() of another size."""
    models = [training.make_model() for _ in range(2)]
    made = [(model, run_ranks(1, lambda model=model: training.wrap(model, **options))[0]) for model in models]

    def program():
        return training.trained(*made[hvd.rank()], 3)

    together = training.same_on_all(run_ranks(2, program))
    if "op" not in options:
        training.close(together, training.alone(range(2), 2, steps=3))
    (by_itself,) = run_ranks(1, program)
    assert not torch.equal(by_itself, together)
    assert torch.isfinite(by_itself).all()


@pytest.mark.parametrize("name", ["_current_graph_task_id", "DisableTorchFunctionSubclass"])
def test_torch_without_a_private_name_is_told_at_wrapping(monkeypatch, name):
    model = training.make_model()
    monkeypatch.delattr(torch._C, name)
    with pytest.raises(
        hvd.MissingExtraError, match=rf"needs torch._C.{name}, which torch 2\.\d+.* lacks; torch 2.4 to"
    ):
        run_ranks(1, lambda: training.wrap(model))


@pytest.mark.parametrize("name", ["allreduce_", "broadcast_"])
@each_rank_of(2)
def test_a_saved_tensor_that_changes_in_place_is_noticed_by_autograd(name):
    weight = torch.ones(3, requires_grad=True)
    x = torch.full((3,), hvd.rank() + 1.0)
    loss = (weight * x).sum()
    if name == "allreduce_":
        hvd.allreduce_(x, name="x")
    else:
        hvd.broadcast_(x, 1, name="x")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        assert torch.equal(hvd.allreduce_(torch.ones(3), name="inference"), torch.ones(3))


def test_batch_normalisation_is_replaced_in_a_model():
    def program():
        model = torch.nn.Sequential(
            torch.nn.Conv1d(2, 3, 2),
            torch.nn.Sequential(torch.nn.BatchNorm1d(3, momentum=0.3), torch.nn.ReLU()),
            torch.nn.SyncBatchNorm(3, affine=False),
        ).double()
        before = dict(model.named_parameters())
        model[1].eval()
        assert hvd.SyncBatchNorm.convert_sync_batchnorm(model) is model
        assert [type(each) for each in (model[1][0], model[2])] == [hvd.SyncBatchNorm] * 2
        assert (model[1][0].momentum, model[1][0].training, model[2].affine) == (0.3, False, False)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert hvd.SyncBatchNorm.convert_sync_batchnorm(model)[2] is model[2]
        model.train()
        own = torch.randn(4, 2, 5, generator=torch.Generator().manual_seed(hvd.rank()), dtype=torch.float64)
        model(own)
        return model[1][0].running_mean

    (one, other) = run_ranks(2, program)
    assert torch.equal(one, other)
    assert one.any()
    layer = torch.nn.BatchNorm2d(3)  # itself
    assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(layer)) is hvd.SyncBatchNorm
    assert "process_set" not in vars(layer)


def test_an_error_of_an_argument_is_no_failed_collective():
    assert not issubclass(hvd.InputError, hvd.HorovodInternalError)
