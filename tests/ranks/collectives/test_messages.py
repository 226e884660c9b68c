"""What each algorithm over messages has of its own, on threads: who sends what to whom, in which order, how far ahead.

Its results are tested beside those of the others: an all-reduce's in test_allreduce_algorithms.py.
"""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import bruck, direct, doubling, halving, pairwise, ring, tree
from ringreduce.collectives.ops import Average, Reduction, Sum
from ringreduce.collectives.partition import chunk_bounds, halvings
from ringreduce.errors import InputError
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of, reduced_over_messages, transport
from tests.support.reference import SIZES, assert_reduced, data


def reduction(op, name, size):
    return Reduction(op, TABLE[name], size)


def sent(module, name, count, size, *options):
    """The messages of an all-reduce, in the order of each rank."""
    messages = []
    arrays = [data(name, count, rank) for rank in range(size)]
    reduced_over_messages(module, arrays, reduction(Sum, name, size), *options, messages=messages)
    return messages


def by_source(messages, size):
    return [[each for each in messages if each.source == rank] for rank in range(size)]


@pytest.mark.parametrize("module", [ring, halving, direct], ids=["ring", "halving", "direct"])
def test_long_messages_travel_in_segments(module):
    """Chunks of 51 and 50 elements, once on each way."""
    lengths = Counter(each.nbytes for each in sent(module, "float64", 101, 2, 160))
    assert lengths == {160: 8, 88: 2, 80: 2}


# The ring


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
    chunks = np.diff(chunk_bounds(1000, size)).tolist()
    for rank, mine in enumerate(by_source(sent(ring, "float64", 1000, size), size)):
        assert [each.destination for each in mine] == [(rank + 1) % size] * (2 * (size - 1))
        kept = chunks[(rank + 1) % size] + chunks[(rank + 2) % size]  # one chunk stays in each phase
        assert sum(each.nbytes for each in mine) == 8 * (2 * 1000 - kept)


def test_16_bit_floats_travel_as_float32_only_until_they_are_finished():
    assert sorted(each.nbytes for each in sent(ring, "float16", 100, 2)) == [100, 100, 200, 200]


class Counting:
    """A transport that counts what was sent and not yet answered."""

    def __init__(self, inner):
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.sent = self.most = 0

    def send(self, array, destination, tag):
        self.sent += 1
        return self.inner.send(array, destination, tag)

    def receive(self, array, source, tag):
        request = self.inner.receive(array, source, tag)
        wait = request.wait

        def answered():
            wait()
            self.most = max(self.most, self.sent)
            self.sent -= 1

        request.wait = answered
        return request


@pytest.mark.parametrize("size", [2, 3, 5])
def test_no_more_segments_are_under_way_than_may_be(size, monkeypatch):
    """Each rank's sends, less what it has received: it begins with some, and then sends one for each that came."""
    monkeypatch.setattr(ring, "SENDS_AHEAD", 3)
    arrays = [data("float64", 1003, rank) for rank in range(size)]

    def program():
        flat, counting = arrays[transport().rank].copy(), Counting(transport())
        complete(ring.allreduce(flat, counting, reduction(Sum, "float64", size), 64))
        assert_reduced(flat, Sum, arrays)
        return counting.most

    assert run_ranks(size, program, buffered=True) == [3] * size


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


# The direct all-reduce; test_deterministic.py has its bits


@pytest.mark.parametrize("name", ["float16", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_each_pair_of_ranks_exchanges_its_two_chunks_raw_and_finished(size, name):
    bounds = chunk_bounds(1000, size)
    expected = Counter()
    for source, target in itertools.permutations(range(size), 2):
        for tag, owner in ((direct.RAW_TAG, target), (direct.FINISHED_TAG, source)):
            nbytes = (bounds[owner + 1] - bounds[owner]) * np.dtype(name).itemsize
            expected[source, target, tag, nbytes] += 1
    assert Counter(tuple(each) for each in sent(direct, name, 1000, size)) == expected


def test_no_rank_is_flooded():
    """Everybody sends a row to the rank after it first, then to the one after that."""
    for rank, mine in enumerate(by_source(sent(direct, "float32", 100, 4), 4)):
        raw = [each.destination for each in mine if each.tag == direct.RAW_TAG]
        assert raw == [(rank + distance) % 4 for distance in (1, 2, 3)]


def test_many_ranks_have_shorter_segments(monkeypatch):
    monkeypatch.setattr(direct, "AHEAD_BYTES", 6 * 128)
    monkeypatch.setattr(direct, "LEAST_SEGMENT_BYTES", 32)
    longest = {size: max(each.nbytes for each in sent(direct, "float64", 2000, size)) for size in (2, 4, 9)}
    assert longest == {2: 384, 4: 128, 9: 48}
    arrays = [data("float64", 2000, rank) for rank in range(9)]
    assert_reduced(reduced_over_messages(direct, arrays, reduction(Sum, "float64", 9))[0], Sum, arrays)


# Recursive doubling


def in_pairs(arrays):
    """The sum as the docstring draws it: rows of ranks, the lower row first; the first odd ranks fold in before."""
    folded = len(arrays) - (1 << (len(arrays).bit_length() - 1))
    row = [arrays[2 * k] + arrays[2 * k + 1] for k in range(folded)] + arrays[2 * folded :]
    while len(row) > 1:
        row = [row[k] + row[k + 1] for k in range(0, len(row), 2)]
    return row[0]


@pytest.mark.parametrize("size", [*SIZES, 13])
def test_the_bits_of_doubling_are_those_of_a_sum_in_pairs(size):
    arrays = [data("float32", 1003, rank) for rank in range(size)]
    for result in reduced_over_messages(doubling, arrays, reduction(Sum, "float32", size)):
        assert result.tobytes() == in_pairs(arrays).tobytes()


@pytest.mark.parametrize("size", [*SIZES, 13])
def test_doubling_takes_a_logarithm_of_steps(size):
    """Each member swaps with one other in each step; whoever folds in sends once and receives once."""
    messages = sent(doubling, "float16", 10, size)
    members = 1 << (size.bit_length() - 1)
    folded = size - members
    steps = members.bit_length() - 1
    for rank, mine in enumerate(by_source(messages, size)):
        assert len(mine) == steps if rank >= 2 * folded else (1 if rank % 2 else steps + 1)
    assert Counter(each.nbytes for each in messages) == +Counter({40: members * steps + 2 * folded})


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
def test_doubling_writes_no_memory_that_is_still_being_sent(size):
    """All of a step's messages are waited for before the next step posts its own."""
    watched = Watched(transport())
    for request in doubling.allreduce(np.ones(4), watched, reduction(Sum, "float64", size)):
        assert len(watched.open) <= 2
        request.wait()
        watched.open.remove(request)
    assert not watched.open


# Halving


@in_a_loop("size", [*range(1, 10), 16])
def test_halving_takes_a_logarithm_of_steps_and_as_few_bytes_as_the_ring(size):
    messages = sent(halving, "float16", 1000, size)
    steps = math.ceil(math.log2(size))
    assert len(halvings(size)) == steps
    ahead = {half for _, half in halvings(size)}
    for rank, mine in enumerate(by_source(messages, size)):
        partners = {(each.destination - rank) % size for each in mine}
        assert partners == ahead | {(size - each) % size for each in ahead}, "the same circle for all"
        assert 2 * steps <= len(mine) <= 4 * steps, "a message a step, or two beyond the last chunk"
    # there as float32 sums, back as 16 bits
    assert sum(each.nbytes for each in messages) == (4 + 2) * 1000 * (size - 1)


# The pairwise all-to-all


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
        parts = [np.split(arrays[source], np.cumsum(counts[source])[:-1])[rank] for source in range(size)]
        np.testing.assert_array_equal(result, np.concatenate(parts))


def exchanged(size, count, *options):
    """The messages of an all-to-all of so many elements for each."""
    messages, rows = [], np.zeros((2, size, count))
    run_ranks(size, lambda: complete(pairwise.alltoall(*rows.copy(), transport(), *options)), messages=messages)
    return messages


@pytest.mark.parametrize("size", SIZES)
def test_pairwise_alltoall_floods_no_rank(size):
    """In round i everybody sends one message to the rank i after it; what stays at home is no message."""
    for rank, mine in enumerate(by_source(exchanged(size, 5), size)):
        assert [(each.destination, each.nbytes) for each in mine] == [((rank + k) % size, 40) for k in range(1, size)]


def test_long_parts_of_an_alltoall_travel_in_segments():
    assert sorted(each.nbytes for each in exchanged(2, 25, 80)) == [40] * 2 + [80] * 4


# The tree's broadcast, and Bruck's allgather


@pytest.mark.parametrize("size", SIZES)
def test_tree_broadcast_from_every_root(size):
    for root, count in itertools.product(range(size), (0, 1, 1000)):
        messages = []

        def program(root=root, count=count):
            flat = data("float32", count, transport().rank)
            complete(tree.broadcast(flat, transport(), root, 512))
            result = flat.copy()
            flat[...] = np.nan  # it is the caller's again: whoever still reads it would spread this
            return result

        for result in run_ranks(size, program, messages=messages):
            np.testing.assert_array_equal(result, data("float32", count, root))
        received = Counter(message.destination for message in messages)
        segments = -(-count * 4 // 512)
        assert received == Counter({rank: segments for rank in range(size) if rank != root and segments})


@in_a_loop("size", range(1, 18))
def test_the_tree_is_as_deep_as_a_logarithm_and_reaches_all(size):
    reached, depth = {0}, 0
    level = [0]
    while level:
        level = [child for place in level for child in tree.family(place, size)[1]]
        assert not reached & set(level)
        reached |= set(level)
        depth += bool(level)
    assert reached == set(range(size))
    assert depth <= max(0, (size - 1)).bit_length()
    assert all(place in tree.family(tree.family(place, size)[0], size)[1] for place in range(1, size))


@pytest.mark.parametrize("size", SIZES)
def test_bruck_allgather_takes_a_logarithm_of_rounds(size):
    messages = []

    def program():
        return complete(bruck.allgather(np.arange(3) + 10 * transport().rank, transport()))

    for result in run_ranks(size, program, messages=messages):
        np.testing.assert_array_equal(result, np.arange(3) + 10 * np.arange(size)[:, None])
    assert len(messages) == size * (size - 1).bit_length()
