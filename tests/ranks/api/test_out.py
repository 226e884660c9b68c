"""Results of allgather and reducescatter in an array that the caller keeps."""

import numpy as np
import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of

STEPS = 3
worlds = pytest.mark.parametrize(
    "hosts", [[0], [0, 0, 0], [0, 1, 2], [0, 0, 1]], ids=["alone", "host", "hosts", "both"]
)


def mine(rank, rows, step=0, dtype=np.float32):
    return (np.arange(2 * rows).reshape(rows, 2) + 100 * rank + step).astype(dtype)


@worlds
@pytest.mark.parametrize("kind", ["numpy", "torch", "strided"])
def test_a_result_goes_into_the_array_that_is_given(hosts, kind):
    """Also where only some ranks give one; named and unnamed, at once and later."""
    size = len(hosts)
    of = torch.from_numpy if kind == "torch" else lambda array: array
    gathered = lambda step: np.concatenate([mine(rank, rank + 2, step) for rank in range(size)])  # noqa: E731

    def program():
        rank = rr.rank()
        rows = len(gathered(0))
        whole = np.full((2, rows), -1, np.float32).T if kind == "strided" else np.full((rows, 2), -1, np.float32)
        part = np.full(mine(0, 7).reshape(7, 2)[rank::size].shape, -1, np.float32)
        all_rows, own_rows = of(whole), of(part)
        for step in range(STEPS):
            own = of(mine(rank, rank + 2, step))
            out = all_rows if rank != 1 or step else None
            result = rr.allgather(own, f"gather{step % 2}", out=out)
            assert out is None or result is out
            np.testing.assert_array_equal(np.asarray(result), gathered(step))
            whole[...] = -1
            assert rr.allgather_async(own, out=all_rows).wait() is all_rows
            np.testing.assert_array_equal(whole, gathered(step))
            total = sum(mine(each, 7, step) for each in range(size))
            low = sum(7 // size + (each < 7 % size) for each in range(rank))
            each = of(mine(rank, 7, step))
            assert rr.reducescatter(each, "scatter", op=rr.Sum, out=own_rows) is own_rows
            np.testing.assert_array_equal(part, total[low : low + len(part)])
            part[...] = -1
            assert rr.reducescatter_async(each, op=rr.Sum, out=own_rows).wait() is own_rows
            np.testing.assert_array_equal(part, total[low : low + len(part)])
            np.testing.assert_array_equal(np.asarray(each), mine(rank, 7, step), "the caller's own")

    run_ranks(size, program, hosts=hosts)


@each_rank_of(2)
def test_an_out_that_does_not_fit_is_refused_and_the_job_goes_on():
    own = mine(rr.rank(), 4)
    with pytest.raises(rr.InputError, match=r"allgather: out is float64 on cpu; expected float32 on cpu"):
        rr.allgather(own, out=np.empty((8, 2)))
    with pytest.raises(rr.InputError, match=r"allgather: 'out' and 'tensor' have memory in common|'tensor' and 'out'"):
        rr.allgather(own, out=own[1:])
    with pytest.raises(rr.InputError, match=r"reducescatter: out has shape \(4, 2\); expected \(2, 2\)"):
        rr.reducescatter(own, "small", out=np.empty((4, 2), np.float32))
    with pytest.raises(rr.InputError, match=r"reducescatter: out, with compression=.*FP16"):
        rr.reducescatter(own, out=np.empty((2, 2), np.float32), compression=rr.Compression.fp16)
    kept = np.empty((8, 2), np.float32)
    if rr.rank():
        with pytest.raises(rr.InputError, match=r"allgather: out has shape \(7, 2\); expected \(8, 2\)"):
            rr.allgather(own, "alone", out=kept[:7])
    else:
        rr.allgather(own, "alone", out=kept)
    return rr.allgather(own, out=kept).copy()


@each_rank_of(2)
def test_no_gradient_goes_through_out():
    own = torch.from_numpy(mine(rr.rank(), 4)).requires_grad_()
    out = torch.empty(8, 2)
    leaf = torch.empty(8, 2, requires_grad=True)
    for call in (
        lambda: hvd.allgather(own, out=out),
        lambda: hvd.reducescatter(own, "parts", out=out[:2]),
        lambda: hvd.allgather(own.detach(), "into a leaf", out=leaf),
    ):
        with pytest.raises(
            rr.InputError, match=r"(allgather|reducescatter): gradients do not flow through out=; pass tensor"
        ):
            call()
    assert hvd.allgather(own.detach(), out=out) is out
    with torch.no_grad():
        assert hvd.allgather(own, "again", out=out) is out
    np.testing.assert_array_equal(out, np.concatenate([mine(rank, 4) for rank in range(2)]))
