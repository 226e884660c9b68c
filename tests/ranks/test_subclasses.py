"""Arrays of a subclass: their elements are those of the plain array, whatever the class makes of shapes and slices."""

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks

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


KINDS = {
    "matrix": lambda array: array.view(np.matrix),
    "recarray": lambda array: array.view(np.recarray),
    "memmap": mapped,
    "odd": lambda array: np.ndarray.view(array, Odd),
    "odd transposed": lambda array: np.ndarray.view(array.T.copy(), Odd).T,
    "odd columns": lambda array: np.ndarray.view(np.repeat(array, 2, axis=1)[:, ::2], Odd),
    "tensor": lambda array: torch.tensor(array).as_subclass(Named),
    "tensor transposed": lambda array: torch.tensor(array.T).as_subclass(Named).T,
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
    yield lambda array: rr.allreduce({"w": array}, compression=rr.Compression.fp16)["w"], mean
    yield lambda array: rr.DistributedOptimizer(lambda grads: grads)({"w": array})["w"], mean


def program(make):
    for call, expected in calls(rr.rank(), rr.size()):
        found = call(make(values(rr.rank())))
        np.testing.assert_array_equal(
            found.detach() if isinstance(found, torch.Tensor) else np.asarray(found), expected
        )
    assert rr.allreduce(np.ones(2), op=rr.Sum).tolist() == [rr.size()] * 2


@pytest.mark.parametrize("settings", [{}, {"algorithm": "ring"}], ids=str)
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 2)], ids=["one host", "three hosts"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_every_function_takes_them(kind, hosts, settings):
    run_ranks(3, lambda: program(KINDS[kind]), hosts=hosts, settings=Settings(**settings))


def test_masked_arrays_are_refused_by_every_function_and_nothing_follows():
    masked = np.ma.masked_array(values(0), values(0) > 3)

    def of_masked():
        for call, _ in calls(rr.rank(), rr.size()):
            for array in (masked.copy(), masked.T.copy().T):
                with pytest.raises(rr.UnsupportedArrayError, match=r"a masked array .*; pass array.filled\(value\)"):
                    call(array)
        program(np.asarray)

    run_ranks(2, of_masked)
