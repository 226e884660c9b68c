"""The public functions on threads and on real ranks: one pass over each, errors that every rank sees, training."""

import numpy as np
import pytest

import ringreduce as rr
from tests.support.reference import FLOATS, INTEGERS, assert_reduced, data
from tests.support.world import each_rank, on_every_world


@each_rank(on_every_world)
def test_grouped_allreduce_of_mixed_tensors():
    names = ["bool", *FLOATS, *INTEGERS] * 3
    arrays = [[data(name, 10 * k, rank, k) for k, name in enumerate(names)] for rank in range(rr.size())]
    results = rr.grouped_allreduce(arrays[rr.rank()], op=rr.Sum)
    for k, result in enumerate(results):
        assert_reduced(result, rr.Sum, [each[k] for each in arrays])


@each_rank(on_every_world)
def test_tensors_larger_than_a_slot():
    arrays = [data("float32", 3_000_001, rank) for rank in range(rr.size())]
    assert_reduced(rr.allreduce(arrays[rr.rank()]), rr.Average, arrays)


@each_rank(on_every_world)
def test_a_mismatch_is_an_error_on_every_rank_and_the_job_goes_on():
    last = rr.size() - 1
    for _ in range(3):
        where = rf"rank {last} of {rr.size()}, allreduce 'w' \(test_every_world.py:\d+\)"
        message = rf"{where}: float32\[3\], but rank 0 has float32\[4\]"
        with pytest.raises(rr.MismatchError, match=message):
            rr.allreduce(np.zeros(3 if rr.rank() == last else 4, np.float32), name="w")
        assert rr.allreduce(np.int64(1), op=rr.Sum) == rr.size()


@each_rank(on_every_world)
def test_optimizers_agree_bit_for_bit():
    w = data("float64", 50, rr.rank())
    rr.broadcast_(w, 0)

    def descend(grads):
        w[...] -= 0.1 * grads["w"]

    optimizer = rr.DistributedOptimizer(descend)
    for step in range(20):
        optimizer({"w": w - data("float64", 50, rr.rank(), step)})
    assert len({each.tobytes() for each in rr.allgather_object(w)}) == 1
