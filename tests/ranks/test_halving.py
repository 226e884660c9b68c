"""Halving on threads: results, their bits, and the pattern of its messages."""

import math
from collections import Counter

import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import halving
from ringreduce.ops import Reduction, Sum
from ringreduce.partition import halvings
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.ranks.on_threads import transport
from tests.support.reference import data

SIZES = range(1, 10)


def reduced_by_all(arrays, reduction, messages=None, buffered=False, segment_bytes=1 << 20):
    """The results of all ranks, each of whom gives one of `arrays`."""

    def program():
        array = arrays[transport().rank].copy()
        complete(halving.allreduce(array.view(reduction.element.storage), transport(), reduction, segment_bytes))
        return array

    return run_ranks(len(arrays), program, messages=messages, buffered=buffered)


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
