"""Halving on threads: results, their bits, and the pattern of its messages."""

import math
from collections import Counter

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import halving
from ringreduce.ops import Average, Reduction, Sum
from ringreduce.partition import halvings
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.ranks.on_threads import transport
from tests.support.reference import MATRIX, all_but_few_extended, assert_reduced, data, numpy_dtype, readable
from tests.support.tiers import parted

SIZES = range(1, 10)


def reduced_by_all(arrays, reduction, messages=None, buffered=False, segment_bytes=1 << 20):
    """The results of all ranks, each of whom gives one of `arrays`."""

    def program():
        array = arrays[transport().rank].copy()
        complete(halving.allreduce(array.view(reduction.element.storage), transport(), reduction, segment_bytes))
        return array

    return run_ranks(len(arrays), program, messages=messages, buffered=buffered)


@pytest.mark.parametrize("segment_bytes", parted([64, 4096, 1 << 20], lambda nbytes: nbytes <= 4096))
@pytest.mark.parametrize("size", [*SIZES, 13])
def test_every_count(size, segment_bytes):
    for count in sorted({0, 1, size - 1, size, size + 1, 1000, 100003}):
        if segment_bytes == 64 and count > 1000:
            continue
        arrays = [data("float64", count, rank) for rank in range(size)]
        kind = Reduction(Sum, TABLE["float64"], size)
        results = reduced_by_all(arrays, kind, segment_bytes=segment_bytes, buffered=count % 2 == 0)
        assert_reduced(results[0], Sum, arrays)
        assert all(result.tobytes() == results[0].tobytes() for result in results), "the same bits on every rank"


@pytest.mark.parametrize(("name", "op"), all_but_few_extended(MATRIX), **readable)
def test_every_type_and_op(name, op):
    for size, count in ((1, 7), (2, 9), (3, 10), (4, 101), (7, 23)):
        arrays = [data(name, count, rank) for rank in range(size)]
        results = reduced_by_all(arrays, Reduction(op, TABLE[name], size), segment_bytes=64)
        assert_reduced(results[0], op, arrays)
        assert all(result.tobytes() == results[0].tobytes() for result in results), "the same bits on every rank"


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


@pytest.mark.parametrize("size", [*SIZES, 16])
def test_a_logarithm_of_steps_and_as_few_bytes_as_the_ring(size):
    messages, count = [], 1000
    arrays = [data("float16", count, rank) for rank in range(size)]
    reduced_by_all(arrays, Reduction(Sum, TABLE["float16"], size), messages)
    steps = math.ceil(math.log2(size))
    assert len(halvings(size)) == steps
    ahead = {half for _, half in halvings(size)}
    for rank in range(size):
        mine = [each for each in messages if each.source == rank]
        partners = {(each.destination - rank) % size for each in mine}
        assert partners == ahead | {(size - each) % size for each in ahead}, "the same circle for all"
        assert 2 * steps <= len(mine) <= 4 * steps, "a message a step, or two beyond the last chunk"
    # there as float32 sums, back as 16 bits
    assert sum(each.nbytes for each in messages) == (4 + 2) * count * (size - 1)


def test_long_messages_travel_in_segments():
    messages = []
    arrays = [data("float64", 100, rank) for rank in range(2)]
    reduced_by_all(arrays, Reduction(Sum, TABLE["float64"], 2), messages, segment_bytes=160)
    assert Counter(each.nbytes for each in messages) == {160: 8, 80: 4}, "50 elements, twice each way"


def test_on_return_the_memory_is_the_callers_again():
    def program():
        flat = np.ones(100)
        complete(halving.allreduce(flat, transport(), Reduction(Sum, TABLE["float64"], 7)))
        result = flat.copy()
        flat[...] = np.nan  # whoever still reads it would spread this
        assert result.tolist() == [7.0] * 100

    run_ranks(7, program)
