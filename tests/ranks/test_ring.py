"""The ring on threads: its halves, the pattern of its messages, and how many segments are under way."""

from collections import Counter

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import ring
from ringreduce.collectives.partition import chunk_bounds
from ringreduce.errors import InputError
from ringreduce.ops import Average, Reduction, Sum
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support.on_threads import transport
from tests.support.reference import SIZES, assert_reduced, data


def reduction(op, name, size):
    return Reduction(op, TABLE[name], size)


@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_scatter_reduce_then_allgather_is_allreduce(size, buffered):
    arrays = [data("float32", 1003, rank) for rank in range(size)]

    def program():
        flat = arrays[transport().rank].copy()
        low, high = complete(ring.scatter_reduce(flat, transport(), reduction(Average, "float32", size), 256))
        assert_reduced(flat[low:high], Average, [each[low:high] for each in arrays])
        bounds = chunk_bounds(1003, size)
        owned = (transport().rank + 1) % size
        assert (low, high) == (bounds[owned], bounds[owned + 1])
        complete(ring.allgather(flat, transport(), segment_bytes=256))
        return flat

    for result in run_ranks(size, program, buffered=buffered):
        assert_reduced(result, Average, arrays)


def test_ring_allgather_refuses_counts_that_do_not_fit():
    def program():
        complete(ring.allgather(np.zeros(5), transport(), [2, 2]))

    with pytest.raises(InputError, match="allgather: 2 counts with sum 4 for 2 ranks and 5 elements"):
        run_ranks(2, program)


@pytest.mark.parametrize("size", SIZES)
def test_the_ring_sends_to_the_right_only_and_the_least_that_is_possible(size):
    count = 1000
    messages = []

    def program():
        complete(ring.allreduce(np.zeros(count), transport(), reduction(Sum, "float64", size)))

    run_ranks(size, program, messages=messages)
    per_rank = Counter(message.source for message in messages)
    assert all(message.destination == (message.source + 1) % size for message in messages)
    assert all(per_rank[rank] == 2 * (size - 1) for rank in range(size))
    bounds = chunk_bounds(count, size)
    for rank in range(size):
        sent = sum(message.nbytes for message in messages if message.source == rank)
        chunks = [bounds[k + 1] - bounds[k] for k in range(size)]
        kept = chunks[(rank + 1) % size] + chunks[(rank + 2) % size]  # one chunk stays in each phase
        assert sent == 8 * (2 * count - kept)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_no_more_segments_are_under_way_than_may_be(size, monkeypatch):
    """Each rank's sends, less what it has received: it begins with some, and then sends one for each that came."""
    monkeypatch.setattr(ring, "SENDS_AHEAD", 3)
    most = [0] * size

    class Counting:
        """Counts what was sent and not yet answered."""

        def __init__(self, inner):
            self.inner, self.rank, self.size = inner, inner.rank, inner.size
            self.sent = 0

        def send(self, array, destination, tag):
            self.sent += 1
            return self.inner.send(array, destination, tag)

        def receive(self, array, source, tag):
            request = self.inner.receive(array, source, tag)
            wait = request.wait

            def answered():
                wait()
                most[self.rank] = max(most[self.rank], self.sent)
                self.sent -= 1

            request.wait = answered
            return request

    arrays = [data("float64", 1003, rank) for rank in range(size)]

    def program():
        flat = arrays[transport().rank].copy()
        complete(ring.allreduce(flat, Counting(transport()), reduction(Sum, "float64", size), 64))
        return flat

    for result in run_ranks(size, program, buffered=True):
        assert_reduced(result, Sum, arrays)
    assert most == [3] * size


@pytest.mark.parametrize("sends_ahead", [2, 3, ring.SENDS_AHEAD])
@pytest.mark.parametrize("size", SIZES)
def test_ring_with_few_segments_under_way(size, sends_ahead, monkeypatch):
    monkeypatch.setattr(ring, "SENDS_AHEAD", sends_ahead)
    counts = [(rank * 7) % 5 * 20 for rank in range(size)]  # some are 0, some many segments
    for count in (size - 1, 101, 1000):
        arrays = [data("float64", count, rank) for rank in range(size)]

        def program(arrays=arrays):
            rank = transport().rank
            flat = arrays[rank].copy()
            complete(ring.allreduce(flat, transport(), reduction(Sum, "float64", size), 64))
            gathered = np.full(sum(counts), -1.0)
            gathered[sum(counts[:rank]) : sum(counts[: rank + 1])] = rank
            complete(ring.allgather(gathered, transport(), counts, rank, 16))
            np.testing.assert_array_equal(gathered, np.repeat(np.arange(size), counts))
            return flat

        for result in run_ranks(size, program):
            assert_reduced(result, Sum, arrays)


def test_16_bit_floats_travel_as_float32_only_until_they_are_finished():
    messages = []

    def program():
        complete(ring.allreduce(np.zeros(100, np.float16), transport(), reduction(Sum, "float16", 2)))

    run_ranks(2, program, messages=messages)
    assert sorted(message.nbytes for message in messages) == [100, 100, 200, 200]
