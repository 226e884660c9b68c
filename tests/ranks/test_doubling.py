"""Recursive doubling on threads: the bits of its results, and the pattern of its messages."""

from collections import Counter

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import doubling
from ringreduce.ops import Reduction, Sum
from tests.support.on_threads import each_rank_of, reduced_over_messages, transport
from tests.support.reference import data
from tests.support.tiers import parted

SIZES = parted([*range(1, 10), 13], lambda size: size in (1, 2, 3, 4, 7))


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
    for result in reduced_over_messages(doubling, arrays, Reduction(Sum, TABLE["float32"], size)):
        assert result.tobytes() == in_pairs(arrays).tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_a_logarithm_of_steps(size):
    """Each member swaps with one other in each step; whoever folds in sends once and receives once."""
    messages = []
    arrays = [data("float16", 10, rank) for rank in range(size)]
    reduced_over_messages(doubling, arrays, Reduction(Sum, TABLE["float16"], size), messages=messages)
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
@each_rank_of("size")
def test_no_memory_is_written_that_is_still_being_sent(size):
    """All of a step's messages are waited for before the next step posts its own."""
    watched = Watched(transport())
    steps = doubling.allreduce(np.ones(4), watched, Reduction(Sum, TABLE["float64"], size))
    for request in steps:
        assert len(watched.open) <= 2
        request.wait()
        watched.open.remove(request)
    assert not watched.open
