"""The pairwise all-to-all on threads: results, and the pattern of its messages."""

from collections import Counter

import numpy as np
import pytest

from ringreduce.collectives import pairwise
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support.on_threads import transport
from tests.support.reference import SIZES, data


@pytest.mark.parametrize("name", ["uint8", "float16", "complex128"])
@pytest.mark.parametrize("size", SIZES)
def test_pairwise_alltoall_of_given_counts(size, name):
    """Each pair of ranks has a count of its own, some of them 0, some more than a segment holds."""
    counts = [[(5 * source + 3 * target) % 7 * 9 for target in range(size)] for source in range(size)]
    arrays = [data(name, sum(counts[rank]), rank) for rank in range(size)]

    def program():
        rank = transport().rank
        received = [counts[source][rank] for source in range(size)]
        incoming = np.zeros(sum(received), name)
        outgoing = np.split(arrays[rank].copy(), np.cumsum(counts[rank])[:-1])
        complete(pairwise.alltoall(outgoing, np.split(incoming, np.cumsum(received)[:-1]), transport(), 160))
        return incoming

    for rank, result in enumerate(run_ranks(size, program)):
        starts = [sum(counts[source][:rank]) for source in range(size)]
        parts = [arrays[s][starts[s] : starts[s] + counts[s][rank]] for s in range(size)]
        np.testing.assert_array_equal(result, np.concatenate(parts))


@pytest.mark.parametrize("size", SIZES)
def test_pairwise_alltoall_floods_no_rank(size):
    """In round i everybody sends one message to the rank i after it; what stays at home is no message."""
    messages = []

    def program():
        complete(pairwise.alltoall(np.zeros((size, 5)), np.zeros((size, 5)), transport()))

    run_ranks(size, program, messages=messages)
    pairs = Counter((message.source, message.destination) for message in messages)
    assert pairs == Counter({(a, b): 1 for a in range(size) for b in range(size) if a != b})
    for rank in range(size):
        sent = [message.destination for message in messages if message.source == rank]
        assert sent == [(rank + distance) % size for distance in range(1, size)]
    assert all(message.nbytes == 40 for message in messages)


def test_long_parts_of_an_alltoall_travel_in_segments():
    messages = []

    def program():
        complete(pairwise.alltoall(np.zeros((2, 25)), np.zeros((2, 25)), transport(), 80))

    run_ranks(2, program, messages=messages)
    assert sorted(message.nbytes for message in messages) == [40] * 2 + [80] * 4
