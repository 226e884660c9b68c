"""Arrays that are not C-contiguous: copied by what gives new ones, written back by what changes them in place."""

import numpy as np
import pytest

import ringreduce as rr
from tests.support.on_threads import each_rank_of

torch = pytest.importorskip("torch", reason="torch is not installed: its adapter is not tested here")
hvd = pytest.importorskip("ringreduce.torch")
SIZE = 2


def values():
    return np.arange(48.0).reshape(4, 12) + 100 * rr.rank()


LAYOUTS = {
    "transposed": lambda: values().T,
    "Fortran": lambda: np.asfortranarray(values()),
    "strided": lambda: values()[::-2, 1::3],
    "torch": lambda: torch.tensor(values()).T,
    "torch, strided": lambda: torch.tensor(values())[::2, 1::3],
    "channels last": lambda: torch.tensor(values().reshape(4, 3, 2, 2)).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.tensor(values()).bfloat16().T,
}
CALLS = {
    "allreduce": rr.allreduce,
    "hvd.allreduce": lambda array: hvd.allreduce(array),
    "Sum": lambda array: rr.allreduce(array, op=rr.Sum),
    "broadcast": lambda array: rr.broadcast(array, 1),
    "allgather": rr.allgather,
    "alltoall": rr.alltoall,
    "reducescatter": rr.reducescatter,
    "optimizer": lambda array: rr.DistributedOptimizer(lambda grads: grads)({"w": array})["w"],
}


def contiguous(array):
    return array.contiguous() if isinstance(array, torch.Tensor) else np.ascontiguousarray(array)


def is_contiguous(array):
    return array.is_contiguous() if isinstance(array, torch.Tensor) else array.flags.c_contiguous


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS)
@each_rank_of(SIZE)
def test_functions_that_give_new_arrays(call, layout):
    if call == "hvd.allreduce" and "torch" not in layout:
        return
    strided = LAYOUTS[layout]()
    assert not is_contiguous(strided)
    before = strided.tolist()
    # on one rank only: the others' calls still meet
    mine = strided if rr.rank() == 0 else contiguous(strided)
    result = CALLS[call](mine)
    assert result.tolist() == CALLS[call](contiguous(strided)).tolist()
    assert is_contiguous(result)
    assert strided.tolist() == before, "the caller's array stays"


@pytest.mark.parametrize("layout", LAYOUTS)
@each_rank_of(SIZE)
def test_functions_in_place(layout):
    strided = LAYOUTS[layout]()
    mean = rr.allreduce(contiguous(strided)).tolist()
    assert rr.allreduce_(strided) is strided
    assert strided.tolist() == mean
    strided = LAYOUTS[layout]()
    (same,) = rr.synchronize(rr.grouped_allreduce_async_([strided]))
    assert (same is strided, strided.tolist()) == (True, mean)
    strided = LAYOUTS[layout]()
    roots = rr.broadcast(contiguous(strided), 1).tolist()
    assert rr.broadcast_(strided, 1) is strided
    assert strided.tolist() == roots


@each_rank_of(SIZE)
def test_what_lies_between_stays():
    array = values()
    rr.allreduce_(array[:, ::2], op=rr.Sum)
    np.testing.assert_array_equal(array[:, 1::2], values()[:, 1::2])
    np.testing.assert_array_equal(array[:, ::2], (2 * np.arange(48.0).reshape(4, 12) + 100)[:, ::2])


@each_rank_of(SIZE)
def test_autograd_through_a_transposed_tensor():
    weight = torch.tensor(values(), requires_grad=True)
    (hvd.allreduce(weight.t()) * torch.arange(4.0) * (1 + hvd.rank())).sum().backward()
    expected = (1.5 * torch.arange(4.0)).repeat(12, 1).t().tolist()
    assert weight.grad.tolist() == expected
