"""broadcast_optimizer_state and its kin on threads: whatever state each rank had, it has the root's afterwards."""

import copy
import threading

import pytest
import torch

import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of, known
from tests.support.tiers import adapters, parted
from tests.support.training import make_model, trained

MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, **MOMENTUM),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.3),  # has state before any step
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, **MOMENTUM),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


def make(name, seed, steps, wrapped=None):
    """A model and its optimizer after some steps, with values of the seed's own."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    first, *others = model.parameters()
    groups = [{"params": others}, {"params": [first], "lr": 0.001 * (seed + 1)}]
    optimizer = OPTIMIZERS[name](groups)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=wrapped)
    for _ in range(steps):
        step(model, optimizer, generator)
    return model, optimizer


def step(model, optimizer, generator):
    optimizer.zero_grad()
    model(torch.randn(5, 3, generator=generator)).square().mean().backward()
    optimizer.step()


def assert_same(one, other):
    """Equal to the last bit, in types and keys too."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("name", "roots", "others"),
    parted(
        [(name, *steps) for name in OPTIMIZERS for steps in [(0, 0), (2, 0), (0, 2), (3, 1)]],
        lambda name, *steps: name == "Adam" or steps in ((0, 2), (3, 1)),
        adapters,
    ),
)
def test_all_ranks_have_the_roots_state(name, roots, others):
    """And take the same steps from there on."""

    def program():
        is_root = hvd.rank() == 1
        model, optimizer = make(name, hvd.rank(), roots if is_root else others)
        before = copy.deepcopy(optimizer.state_dict())
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, 1)
        if is_root:
            assert_same(optimizer.state_dict(), before)
        assert_same([parameter.detach() for parameter in model.parameters()], weights)
        after = copy.deepcopy(optimizer.state_dict())
        hvd.broadcast_parameters(model.state_dict(), 1)
        step(model, optimizer, torch.Generator().manual_seed(5))
        return after, optimizer.state_dict(), [parameter.detach() for parameter in model.parameters()]

    zeroth, root, second = run_ranks(3, program)
    assert_same(zeroth, root)
    assert_same(second, root)
    assert root[0]["param_groups"][1]["lr"] == pytest.approx(0.002)
    assert bool(root[0]["state"]) == (roots > 0 and name != "SGD") or name in ("Adagrad", "SGD")


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["Average", "Adasum"])
@pytest.mark.parametrize("root_steps", [0, 2])
def test_of_a_wrapped_optimizer(root_steps, op):
    def program():
        model, optimizer = make("Adam", hvd.rank(), 0, wrapped=op)
        if root_steps:  # all take them, then the others lose their state
            for _ in range(root_steps):
                step(model, optimizer, torch.Generator().manual_seed(hvd.rank()))
        if hvd.rank():
            optimizer.state.clear()
            optimizer.param_groups[0]["betas"] = (0.5, 0.6)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        state, groups = optimizer.state, optimizer.param_groups
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        assert optimizer.state is state, "who shares it sees the new one"
        assert optimizer.param_groups is groups
        state_dict = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer, torch.Generator().manual_seed(7))
        scheduler.step()
        return state_dict, optimizer.param_groups[1]["lr"]

    for state_dict, lr in (results := run_ranks(4, program)):
        assert_same(state_dict, results[0][0])
        assert lr == pytest.approx(0.0005)
    assert len(results[0][0]["state"]) == (6 if root_steps else 0)
    assert results[0][0]["param_groups"][0]["betas"] == (0.9, 0.999)


class Odd(torch.optim.Optimizer):
    """State of every kind: nested, not contiguous, in types that no collective takes, and of no parameter."""

    def __init__(self, parameters, rank):
        super().__init__(parameters, {"lr": rank, "schedule": [torch.tensor([rank, 1.5]), None, "fast"]})
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if number == 0 or rank == 0:
                self.state[parameter] = {
                    "moments": (torch.full((3, 2), rank + 0.5), {"deep": [torch.arange(4) * rank]}),
                    "transposed": torch.arange(6.0).reshape(2, 3).t() + rank,
                    "eighth": torch.full((3,), rank + 0.5).to(torch.float8_e4m3fn),
                    "half": torch.full((2, 0), rank).bfloat16(),
                    "flag": rank == 0,
                    "nothing": None,
                }
        self.state["steps taken"] = {"count": rank, "tensor": torch.tensor(rank)}
        if rank:
            self.state["only here"] = 1
            self.param_groups[0]["only here"] = 1


@each_rank_of(3)
def test_state_of_every_kind():
    mine, expected = (
        Odd([torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))], rank) for rank in (hvd.rank(), 0)
    )
    hvd.broadcast_optimizer_state(mine, 0)
    assert_same(mine.state_dict(), expected.state_dict())


class Labelled(torch.Tensor):
    """A user's own kind of tensor."""


UNPICKLABLE = threading.Lock()
ODD = {
    "strided": lambda seed: (torch.arange(6.0) + seed)[::2],
    "expanded": lambda seed: torch.full((1, 3), seed + 1.0).expand(2, 3),
    "overlapping": lambda seed: (torch.arange(6.0) + seed).as_strided((3, 3), (1, 1)),
    "conjugated": lambda seed: (torch.ones(2) * (seed + 1j)).conj(),
    "negated": lambda seed: (torch.ones(2) * (seed + 1j)).conj().imag,
    "a scalar": lambda seed: torch.tensor(seed),
    "empty": lambda seed: torch.zeros(0, 3),
    "a view": lambda seed: torch.arange(12.0).reshape(3, 4)[1:, 1:3] + seed,
    "sparse": lambda seed: (torch.eye(2) * (seed + 1)).to_sparse(),
    "csr": lambda seed: (torch.eye(2) * (seed + 1)).to_sparse_csr(),
    "nested": lambda seed: torch.nested.nested_tensor([torch.ones(2) * seed, torch.ones(3)]),
    "quantized": lambda seed: torch.quantize_per_tensor(torch.eye(2) * seed, 0.5, 0, torch.quint8),
    "meta": lambda seed: torch.ones(2, seed + 2, device="meta"),
    "of a subclass": lambda seed: (torch.ones(2) * seed).as_subclass(Labelled),
    "with gradient": lambda seed: torch.full((2,), seed + 1.0, requires_grad=True),
    "unpicklable": lambda seed: UNPICKLABLE if seed == 1 else None,
}


@pytest.mark.filterwarnings("ignore:.*deprecated", "ignore:.*beta", "ignore:.*prototype", "ignore:.*invariant")
@pytest.mark.parametrize("where", ["state", "group", "other"])
@pytest.mark.parametrize("odd", ODD)
@each_rank_of(2)
def test_a_value_arrives_or_all_ranks_are_told_whatever_it_is(odd, where):
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    value, keys = ODD[odd](hvd.rank()), {"state": parameters[0], "other": "a key"}

    def holder():
        return optimizer.param_groups[0] if where == "group" else optimizer.state[keys[where]]

    holder()["odd"] = value
    try:
        hvd.broadcast_optimizer_state(optimizer, 1)
    except (TypeError, hvd.HorovodInternalError) as error:
        assert odd == "unpicklable"
        assert "cannot pickle" in str(error)  # noqa: PT017 - of both ranks, in their own classes
    else:
        found, expected = holder()["odd"], ODD[odd](1)
        assert (found.shape if odd != "nested" else 0) == (expected.shape if odd != "nested" else 0)
        assert (found.dtype, found.layout, found.device) == (expected.dtype, expected.layout, expected.device)
        assert repr(found.detach().resolve_conj().resolve_neg()) == repr(expected.detach().resolve_conj().resolve_neg())
    assert hvd.allgather_object(hvd.rank()) == [0, 1]


def test_parameters_in_other_memory_formats():
    def program():
        model = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters())
        if hvd.rank() == 0:
            model(torch.ones(1, 2, 4, 4)).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
        return optimizer.state_dict()

    one, two = run_ranks(2, program)
    assert not one["state"][0]["exp_avg"].is_contiguous()
    assert_same(two, one)


@each_rank_of(3, process_sets=[[0, 2]])
def test_in_a_process_set():
    _, optimizer = make("Adam", hvd.rank(), 1)
    if hvd.rank() != 1:
        hvd.broadcast_optimizer_state(optimizer, 2, process_set=known([0, 2], 1))
    assert_same(optimizer.state_dict(), make("Adam", 1 if hvd.rank() == 1 else 2, 1)[1].state_dict())


@pytest.mark.parametrize("steps", [0, 3])
def test_lbfgs(steps):
    """Its state, with lists of tensors, is that of its first parameter. It goes on as on the root."""

    def program():
        generator = torch.Generator().manual_seed(hvd.rank())
        rows, target = (torch.randn(8, 2, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
        parameters = [torch.nn.Parameter(torch.randn(2, 2, generator=generator)) for _ in range(2)]
        optimizer = torch.optim.LBFGS(parameters, lr=0.1 * (hvd.rank() + 1), max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = (rows @ parameters[0] @ parameters[1] - target).square().mean()
            loss.backward()
            return loss

        for _ in range(steps if hvd.rank() == 0 else 1):
            optimizer.step(closure)
        hvd.broadcast_parameters(parameters, root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.step(closure)
        return state, [each.detach() for each in parameters]

    results = run_ranks(2, program)
    assert_same(results[0], results[1])
    assert len(results[0][0]["state"].get(0, {}).get("old_dirs", [])) == (0 if steps == 0 else 5)


@each_rank_of(2)
def test_other_parameters_than_the_roots():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3 - hvd.rank())]
    optimizer = torch.optim.Adam(parameters)
    if hvd.rank() == 0:
        sum(parameters).sum().backward()
        optimizer.step()
    with pytest.raises(ValueError, match=r"rank 1's optimizer has no parameter 'group.0.parameter.2' of .* rank 0's"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == 2


@each_rank_of(2)
def test_a_wrong_root():
    with pytest.raises(ValueError, match="root_rank=5; expected a rank from 0 to 1"):
        hvd.broadcast_optimizer_state(torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))]), 5)
    assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == 2


@each_rank_of(3)
def test_broadcast_parameters_takes_dicts_and_lists():
    model, _ = make("SGD", hvd.rank(), hvd.rank())
    expected = copy.deepcopy(make("SGD", 1, 1)[0].state_dict())
    for root, params, change in [
        (1, model.state_dict(), 0),
        (0, list(model.named_parameters()), 0),
        (2, model.named_parameters(), 2),
        (1, list(model.parameters()), 1),
    ]:
        hvd.broadcast_parameters(params, root_rank=root)
        for name, parameter in model.named_parameters():
            expected[name] = expected[name] + change
            assert_same(parameter.detach(), expected[name])
            parameter.data += hvd.rank()
    assert_same(dict(model.named_buffers()), {name: expected[name] for name, _ in model.named_buffers()})


@pytest.mark.parametrize("params", [7, "weights", torch.ones(3), None])
@each_rank_of(1)
def test_broadcast_parameters_refuses_anything_else(params):
    with pytest.raises(ValueError, match="expected a dict of tensors, or a list of"):
        hvd.broadcast_parameters(params, root_rank=0)


@each_rank_of(3)
def test_objects_with_tensors_in_them():
    mine = {"epoch": hvd.rank(), "weights": torch.full((2,), hvd.rank())}
    told = hvd.broadcast_object(mine, root_rank=1, name="checkpoint")
    assert_same(told, {"epoch": 1, "weights": torch.tensor([1, 1])})
    assert_same(hvd.allgather_object(mine)[2], {"epoch": 2, "weights": torch.tensor([2, 2])})


@each_rank_of(2)
def test_parameters_of_a_wrapped_optimizer_are_matched_by_the_names_that_it_was_given():
    model = make_model()
    named = [*model.named_parameters()][:: -1 if hvd.rank() == 1 else 1]
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([each for _, each in named], lr=0.1), named)
    trained(model, optimizer, 1)
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter]["exp_avg"].fill_(10 * hvd.rank() + number)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for number, parameter in enumerate(model.parameters()):
        assert optimizer.state[parameter]["exp_avg"].unique().tolist() == [number]
