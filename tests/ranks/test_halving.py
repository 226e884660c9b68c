"""Halving on threads: the pattern of its messages."""

import math

import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import halving
from ringreduce.collectives.partition import halvings
from ringreduce.ops import Reduction, Sum
from tests.support.on_threads import reduced_over_messages
from tests.support.reference import data


@pytest.mark.parametrize("size", [*range(1, 10), 16])
def test_a_logarithm_of_steps_and_as_few_bytes_as_the_ring(size):
    messages, count = [], 1000
    arrays = [data("float16", count, rank) for rank in range(size)]
    reduced_over_messages(halving, arrays, Reduction(Sum, TABLE["float16"], size), messages=messages)
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
