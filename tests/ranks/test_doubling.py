"""Recursive doubling on threads: results, their bits, and the pattern of its messages."""

from collections import Counter

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import doubling
from ringreduce.ops import Average, Reduction, Sum
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.ranks.on_threads import transport
from tests.support.reference import MATRIX, all_but_few_extended, assert_reduced, data, numpy_dtype, readable
from tests.support.tiers import parted

SIZES = parted([*range(1, 10), 13], lambda size: size in (1, 2, 3, 4, 7))


def reduced_by_all(arrays, reduction, messages=None, buffered=False):
    """The results of all ranks, each of whom gives one of `arrays`."""

    def program():
        array = arrays[transport().rank].copy()
        complete(doubling.allreduce(array.view(reduction.element.storage), transport(), reduction))
        return array

    return run_ranks(len(arrays), program, messages=messages, buffered=buffered)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_every_count(size, buffered):
    for count in sorted({0, 1, size - 1, size, size + 1, 1000, 100003}):
        arrays = [data("float64", count, rank) for rank in range(size)]
        results = reduced_by_all(arrays, Reduction(Sum, TABLE["float64"], size), buffered=buffered)
        assert_reduced(results[0], Sum, arrays)
        assert all(result.tobytes() == results[0].tobytes() for result in results), "the same bits on every rank"


@pytest.mark.parametrize(("name", "op"), all_but_few_extended(MATRIX), **readable)
def test_every_type_and_op(name, op):
    for size in (1, 2, 3, 4, 7):
        arrays = [data(name, 11, rank) for rank in range(size)]
        results = reduced_by_all(arrays, Reduction(op, TABLE[name], size))
        assert_reduced(results[0], op, arrays)
        assert all(result.tobytes() == results[0].tobytes() for result in results), "the same bits on every rank"


def in_pairs(arrays):
    """The sum as the docstring draws it: rows of ranks, the lower row first; the first odd ranks fold in before."""
    folded = len(arrays) - (1 << (len(arrays).bit_length() - 1))
    row = [arrays[2 * k] + arrays[2 * k + 1] for k in range(folded)] + arrays[2 * folded :]
    while len(row) > 1:
        row = [row[k] + row[k + 1] for k in range(0, len(row), 2)]
    return row[0]


@pytest.mark.parametrize("size", SIZES)
def test_the_bits_are_those_of_a_sum_in_pairs(size):
    arrays = [data("float32", 1003, rank) for rank in range(size)]
    for result in reduced_by_all(arrays, Reduction(Sum, TABLE["float32"], size)):
        assert result.tobytes() == in_pairs(arrays).tobytes()


def test_all_ranks_get_the_same_nan():
    """Which NaN comes out of two is told by their order: partners must not have different ones."""
    payloads = [np.array([0x7FC00000 + 16 * rank], np.uint32).view(np.float32) for rank in range(6)]
    results = reduced_by_all(payloads, Reduction(Sum, TABLE["float32"], 6))
    assert all(np.isnan(result).all() and result.tobytes() == results[0].tobytes() for result in results)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_floats_are_rounded_once(name):
    """1 + e + e, where e is half of the distance to the next number: rounded twice, it would stay 1."""
    half = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[name]
    arrays = [np.full(5, value, numpy_dtype(name)) for value in (1.0, half, half)]
    for result in reduced_by_all(arrays, Reduction(Sum, TABLE[name], 3)):
        np.testing.assert_array_equal(result.astype(np.float64), 1 + 2 * half)


def test_scale_factors_come_before_and_after():
    arrays = [data("int32", 101, rank) for rank in range(3)]
    for result in reduced_by_all(arrays, Reduction(Average, TABLE["int32"], 3, 2.5, 2.0)):
        total = sum(np.trunc(each * 2.5) for each in arrays)
        np.testing.assert_array_equal(result, np.trunc(np.trunc(total / 3) * 2.0))


@pytest.mark.parametrize("size", SIZES)
def test_a_logarithm_of_steps(size):
    """Each member swaps with one other in each step; whoever folds in sends once and receives once."""
    messages = []
    reduced_by_all(
        [data("float16", 10, rank) for rank in range(size)], Reduction(Sum, TABLE["float16"], size), messages
    )
    members = 1 << (size.bit_length() - 1)
    folded = size - members
    steps = members.bit_length() - 1
    sent = Counter(message.source for message in messages)
    for rank in range(size):
        if rank < 2 * folded:
            assert sent[rank] == (1 if rank % 2 else steps + 1)
        else:
            assert sent[rank] == steps
    assert Counter(message.nbytes for message in messages) == +Counter({40: members * steps + 2 * folded})


class Watched:
    """A transport that notes the requests nobody has waited for yet."""

    def __init__(self, inner):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.open = []

    def send(self, array, destination, tag):
        self.open.append(self.inner.send(array, destination, tag))
        return self.open[-1]

    def receive(self, array, source, tag, at_most=False):
        self.open.append(self.inner.receive(array, source, tag, at_most))
        return self.open[-1]


@pytest.mark.parametrize("size", SIZES)
def test_no_memory_is_written_that_is_still_being_sent(size):
    """All of a step's messages are waited for before the next step posts its own."""

    def program():
        watched = Watched(transport())
        steps = doubling.allreduce(np.ones(4), watched, Reduction(Sum, TABLE["float64"], size))
        for request in steps:
            assert len(watched.open) <= 2
            request.wait()
            watched.open.remove(request)
        assert not watched.open

    run_ranks(size, program)


def test_on_return_the_memory_is_the_callers_again():
    def program():
        flat = np.ones(100)
        complete(doubling.allreduce(flat, transport(), Reduction(Sum, TABLE["float64"], 7)))
        result = flat.copy()
        flat[...] = np.nan  # whoever still reads it would spread this
        assert result.tolist() == [7.0] * 100

    run_ranks(7, program)
