"""Arrays of any memory layout and of any subclass: their elements are those of the plain array, and written back."""

import itertools

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of
from tests.support.tiers import adapters, parted

torch = pytest.importorskip("torch", reason="torch is not installed: its adapter is not tested here")
hvd = pytest.importorskip("ringreduce.torch")


class Odd(np.ndarray):
    """Nothing of it works but its memory."""

    def refuse(self, *_, **__):
        raise LookupError("this class has ideas of its own")

    __getitem__ = __setitem__ = __array_ufunc__ = __array_function__ = refuse
    reshape = ravel = view = copy = astype = flatten = refuse


class Named(torch.Tensor):
    """As torchvision's."""


def values(rank):
    return np.arange(24.0).reshape(6, 4) * (rank + 1)


def mapped(array):
    """As np.memmap of a file gives it."""
    made = np.ndarray.__new__(np.memmap, array.shape, array.dtype)
    np.asarray(made)[...] = array
    return made


def spread(array):
    """With gaps between the rows and the columns."""
    return np.repeat(np.repeat(array, 3, 0), 2, 1)


KINDS = {
    "transposed": lambda array: array.T.copy().T,
    "strided": lambda array: spread(array)[::3, ::2],
    "backwards": lambda array: array[::-1].copy()[::-1],
    "matrix": lambda array: array.view(np.matrix),
    "recarray": lambda array: array.view(np.recarray),
    "memmap": mapped,
    "odd": lambda array: np.ndarray.view(array, Odd),
    "odd transposed": lambda array: np.ndarray.view(array.T.copy(), Odd).T,
    "odd columns": lambda array: np.ndarray.view(spread(array)[::3, ::2], Odd),
    "torch": lambda array: torch.tensor(array.T).T,
    "torch, strided": lambda array: torch.tensor(spread(array))[::3, ::2],
    "bfloat16": lambda array: torch.tensor(array.T).bfloat16().T,
    "subclass": lambda array: torch.tensor(array).as_subclass(Named),
    "subclass transposed": lambda array: torch.tensor(array.T).as_subclass(Named).T,
    "parameter": lambda array: torch.nn.Parameter(torch.tensor(array)),
}


def calls(rank, size):
    """Each function, and what it gives of everyone's values."""
    everyones = [values(each) for each in range(size)]
    mean, rows = sum(everyones) / size, 6 // size
    exchanged = np.concatenate([each[rows * rank : rows * (rank + 1)] for each in everyones])
    for functions in (rr, rr.ordered()):
        yield functions.allreduce, mean
        yield functions.allreduce_, mean
        yield lambda array, its=functions: its.broadcast(array, 1), everyones[1]
        yield lambda array, its=functions: its.broadcast_(array, size - 1), everyones[-1]
        yield functions.allgather, np.concatenate(everyones)
        yield functions.alltoall, exchanged
        yield functions.reducescatter, mean[rows * rank : rows * (rank + 1)]
    yield lambda array: rr.grouped_allreduce([np.ones(3), array])[1], mean
    yield lambda array: rr.synchronize(rr.grouped_allreduce_async_([array]))[0], mean
    yield lambda array: rr.allreduce({"w": array}, compression=rr.Compression.fp16)["w"], mean
    yield lambda array: rr.DistributedOptimizer(lambda grads: grads)({"w": array})["w"], mean


def elements(array):
    array = array.detach().float().numpy() if isinstance(array, torch.Tensor) else array
    return np.array(np.ndarray.__array__(array))


def is_contiguous(array):
    return array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous


def program(make):
    """Rank 1 passes plain arrays of the same type: its calls meet the others'."""
    for call, expected in calls(rr.rank(), rr.size()):
        mine = make(values(rr.rank()))
        if rr.rank() == 1:
            mine = mine.detach().clone() if isinstance(mine, torch.Tensor) else values(1)
        found = call(mine)
        np.testing.assert_array_equal(elements(found), expected)
        if found is not mine:
            assert is_contiguous(found)
            np.testing.assert_array_equal(elements(mine), values(rr.rank()), "the caller's array stays")
    assert rr.allreduce(np.ones(2), op=rr.Sum).tolist() == [rr.size()] * 2


@pytest.mark.parametrize(
    ("hosts", "settings"),
    parted(
        itertools.product([(0, 0, 0), (0, 1, 2)], [{}, {"algorithm": "ring"}]),
        lambda hosts, settings: len(set(hosts)) == 1 + 2 * bool(settings),
        adapters,
    ),
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_every_function_takes_them(kind, hosts, settings):
    run_ranks(3, lambda: program(KINDS[kind]), hosts=hosts, settings=Settings(**settings))


@in_a_loop("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@each_rank_of(2)
def test_in_place_the_very_array_is_given_back(kind):
    mine = KINDS[kind](values(rr.rank()))
    assert rr.allreduce_(mine) is rr.broadcast_(mine, 1) is mine


@each_rank_of(2)
def test_who_waits_again_gets_the_array_as_it_is_then():
    channel, other = rr.ordered(), 1 - rr.rank()
    begins = {
        "allreduce": rr.allreduce_async_,
        "broadcast": lambda array: rr.broadcast_async_(array, 0),
        "recv": lambda array: channel.recv_async(array, other),
        "out": lambda array: rr.allgather_async(np.ones((1, 2)), out=array),
    }
    for name, begin in begins.items():
        array = np.ones((2, 2))
        handle = begin(array.T)
        if name == "recv":
            channel.send(np.ones((2, 2)), other)
        rr.synchronize(handle)
        array[:] = -1
        assert (rr.synchronize(handle) == -1).all(), name


@each_rank_of(2)
def test_what_lies_between_stays():
    array, sums = spread(values(rr.rank())), values(0) + values(1)
    rr.allreduce_(array[::3, ::2], op=rr.Sum)
    expected = spread(values(rr.rank()))
    expected[::3, ::2] = sums
    np.testing.assert_array_equal(array, expected)


@each_rank_of(2)
def test_autograd_through_a_transposed_tensor():
    weight = torch.tensor(values(rr.rank()), requires_grad=True)
    (hvd.allreduce(weight.t()) * torch.arange(6.0) * (1 + hvd.rank())).sum().backward()
    assert weight.grad.tolist() == (1.5 * torch.arange(6.0)).repeat(4, 1).t().tolist()


def test_masked_arrays_are_refused_by_every_function_and_nothing_follows():
    masked = np.ma.masked_array(values(0), values(0) > 3)

    def of_masked():
        for call, _ in calls(rr.rank(), rr.size()):
            for array in (masked.copy(), masked.T.copy().T):
                with pytest.raises(rr.UnsupportedArrayError, match=r"a masked array .*; pass array.filled\(value\)"):
                    call(array)
        program(np.asarray)

    run_ranks(2, of_masked)


@each_rank_of(2)
def test_an_array_that_is_in_a_group_twice_is_refused_also_where_the_group_is_known():
    """It would be reduced twice; what else shares memory is looked for the first time alone."""
    one, other = np.ones(3), np.ones(3)
    for step in range(1, 4):
        rr.grouped_allreduce_([one, other], name="group", op=rr.Sum)
        assert (one.tolist(), other.tolist()) == ([2**step] * 3, [2**step] * 3)
        with pytest.raises(rr.InputError, match=r"^allreduce 'group', tensor 2 of 2: it shares memory with tensor 1"):
            rr.grouped_allreduce_([one, one], name="group", op=rr.Sum)
