"""The algorithms on threads, with a transport that buffers nothing: results, and the pattern of their messages."""

import itertools
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import adasum, bruck, pairwise, ring, tree
from ringreduce.errors import CollectiveError, InputError, PeerLostError
from ringreduce.ops import Average, Reduction, Sum
from ringreduce.partition import chunk_bounds
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.ranks.on_threads import transport
from tests.support.reference import MATRIX, all_but_few_extended, assert_reduced, data, readable
from tests.support.tiers import parted

SIZES = parted(range(1, 10), lambda size: size in (1, 2, 3, 4, 7))


def counts_for(size):
    return sorted({0, 1, size - 1, size, size + 1, 1000, 100003})


def reduction(op, name, size):
    return Reduction(op, TABLE[name], size)


@pytest.mark.parametrize("segment_bytes", parted([64, 4096, 1 << 20], lambda length: length != 4096))
@pytest.mark.parametrize("size", SIZES)
def test_ring_allreduce_of_every_count(size, segment_bytes):
    for count in counts_for(size):
        if segment_bytes == 64 and count > 1000:
            continue
        arrays = [data("float64", count, rank) for rank in range(size)]

        def program(arrays=arrays):
            flat = arrays[transport().rank].copy()
            complete(ring.allreduce(flat, transport(), reduction(Sum, "float64", size), segment_bytes))
            return flat

        results = run_ranks(size, program)
        assert_reduced(results[0], Sum, arrays)
        assert all(result.tobytes() == results[0].tobytes() for result in results), "the same bits on every rank"


def test_on_return_the_memory_is_the_callers_again():
    def program():
        for collective in (
            lambda flat: complete(ring.allreduce(flat, transport(), reduction(Sum, "float64", 3), 64)),
            lambda flat: complete(tree.broadcast(flat, transport(), 0, 64)),
        ):
            flat = np.ones(100)
            collective(flat)
            result = flat.copy()
            flat[...] = np.nan  # whoever still reads it would spread this
            assert result.sum() in (100, 300)

    run_ranks(3, program)


def test_memory_that_is_being_sent_is_not_received_into():
    def program():
        flat = np.zeros(4)
        transport().send(flat[:3], 1 - transport().rank, 7)
        transport().receive(flat[2:], 1 - transport().rank, 8)

    with pytest.raises(CollectiveError, match=r"rank \d receives into memory that it is still sending to rank \d"):
        run_ranks(2, program)


@pytest.mark.parametrize(("name", "op"), all_but_few_extended(MATRIX), **readable)
def test_ring_allreduce_of_every_type_and_op(name, op):
    for size, count in ((1, 7), (2, 9), (3, 10), (4, 101)):
        arrays = [data(name, count, rank) for rank in range(size)]

        def program(arrays=arrays, size=size):
            array = arrays[transport().rank].copy()
            complete(ring.allreduce(array.view(TABLE[name].storage), transport(), reduction(op, name, size), 64))
            return array

        for result in run_ranks(size, program):
            assert_reduced(result, op, arrays)


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


@pytest.mark.parametrize("size", SIZES)
def test_ring_allgather_of_given_counts(size):
    counts = [(rank * 7) % 5 for rank in range(size)]  # some are 0

    def program():
        rank = transport().rank
        flat = np.full(sum(counts), -1.0)
        start = sum(counts[:rank])
        flat[start : start + counts[rank]] = rank + np.arange(counts[rank]) / 10
        complete(ring.allgather(flat, transport(), counts, rank, 16))
        return flat

    expected = np.concatenate([rank + np.arange(counts[rank]) / 10 for rank in range(size)])
    for result in run_ranks(size, program):
        np.testing.assert_array_equal(result, expected)


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


def test_long_chunks_travel_in_segments():
    messages = []

    def program():
        complete(ring.allreduce(np.zeros(100), transport(), reduction(Sum, "float64", 2), segment_bytes=160))

    run_ranks(2, program, messages=messages)
    assert sorted(message.nbytes for message in messages) == [80] * 4 + [160] * 8


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
            return Arriving(self, self.inner.receive(array, source, tag))

    class Arriving:
        """A receive that takes one off the count when it was waited for."""

        def __init__(self, counting, request):
            self.counting, self.request, self.peer = counting, request, request.peer

        def done(self):
            return self.request.done()

        def wait(self):
            self.request.wait()
            rank = self.counting.rank
            most[rank] = max(most[rank], self.counting.sent)
            self.counting.sent -= 1

    arrays = [data("float64", 1003, rank) for rank in range(size)]

    def program():
        flat = arrays[transport().rank].copy()
        complete(ring.allreduce(flat, Counting(transport()), reduction(Sum, "float64", size), 64))
        return flat

    for result in run_ranks(size, program, buffered=True):
        assert_reduced(result, Sum, arrays)
    assert most == [3] * size


@pytest.mark.parametrize("sends_ahead", [2, 3])
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


@pytest.mark.parametrize("size", SIZES)
def test_tree_broadcast_from_every_root(size):
    for root, count in itertools.product(range(size), (0, 1, 1000)):
        messages = []

        def program(root=root, count=count):
            flat = data("float32", count, transport().rank)
            complete(tree.broadcast(flat, transport(), root, 512))
            return flat

        for result in run_ranks(size, program, messages=messages):
            np.testing.assert_array_equal(result, data("float32", count, root))
        received = Counter(message.destination for message in messages)
        segments = -(-count * 4 // 512)
        assert received == Counter({rank: segments for rank in range(size) if rank != root and segments})


@pytest.mark.parametrize("size", range(1, 18))
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


@pytest.mark.parametrize("size", SIZES)
def test_nobody_passes_a_barrier_before_all_have_come(size):
    arrived = []

    def program():
        arrived.append(transport().rank)
        complete(bruck.allgather(np.zeros(1), transport()))
        return len(arrived)

    assert run_ranks(size, program) == [size] * size


def test_different_lengths_are_told_by_the_fake_transport():
    def program():
        complete(ring.allreduce(np.zeros(10 + 2 * transport().rank), transport(), reduction(Sum, "float64", 2)))

    with pytest.raises(CollectiveError, match=r"rank \d sent \d+ bytes, but rank \d expected \d+"):
        run_ranks(2, program)


def test_a_deadlock_is_told_by_the_fake_transport():
    def program():
        other = 1 - transport().rank
        transport().receive(np.zeros(1), other, 7).wait()

    with pytest.raises(CollectiveError, match="deadlock: rank 0 waits to receive from rank 1; rank 1 waits to receive"):
        run_ranks(2, program, timeout_s=0.2)


def test_a_rank_that_returns_early_is_named():
    def program():
        if transport().rank != 1:
            complete(bruck.allgather(np.zeros(1), transport()))

    with pytest.raises(PeerLostError, match="rank 1, which has left the job") as caught:
        run_ranks(3, program)
    assert caught.value.lost_ranks == (1,)


def test_the_first_failure_is_the_one_that_is_raised():
    def program():
        if transport().rank == 2:
            raise KeyError("the cause")
        complete(bruck.allgather(np.zeros(1), transport()))

    with pytest.raises(KeyError, match="the cause"):
        run_ranks(3, program)


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
        complete(pairwise.alltoall(arrays[rank].copy(), incoming, transport(), counts[rank], received, 160))
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
        complete(pairwise.alltoall(np.zeros(5 * size), np.zeros(5 * size), transport(), [5] * size, [5] * size))

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
        complete(pairwise.alltoall(np.zeros(50), np.zeros(50), transport(), [25, 25], [25, 25], 80))

    run_ranks(2, program, messages=messages)
    assert sorted(message.nbytes for message in messages) == [40] * 2 + [80] * 4


def adasum_of(arrays):
    """In pairs, pairs of pairs and so on, in extended precision."""
    if len(arrays) == 1:
        return arrays[0]
    a, b = (adasum_of(arrays[k : k + len(arrays) // 2]) for k in (0, len(arrays) // 2))
    common = np.vdot(a, b).real / 2
    return a * (1 - common / np.vdot(a, a).real) + b * (1 - common / np.vdot(b, b).real)


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_adasum_on_a_power_of_two_of_ranks(size, name):
    arrays = [data(name, 101, rank) for rank in range(size)]

    def program():
        flat = arrays[transport().rank].copy()
        complete(adasum.allreduce(flat, transport(), segment_bytes=64))
        return flat

    results = run_ranks(size, program)
    wide = np.clongdouble if name.startswith("complex") else np.longdouble
    tolerance = 20 * np.finfo(name).eps
    np.testing.assert_allclose(results[0], adasum_of([each.astype(wide) for each in arrays]), tolerance, tolerance)
    assert all(result.tobytes() == results[0].tobytes() for result in results), "the same bits on every rank"


def test_adasum_adds_what_is_orthogonal_averages_what_is_equal_and_knows_zero():
    one, other = np.array([3.0, 0.0]), np.array([0.0, 2.0])
    assert adasum.combine(one, other).tolist() == [3, 2]
    assert adasum.combine(one, one).tolist() == [3, 0]
    assert adasum.combine(one, 3 * one).tolist() == [6, 0], "the mean of parallel ones"
    assert adasum.combine(one, -one).tolist() == [0, 0]
    assert adasum.combine(one, 0 * one).tolist() == [3, 0]
    assert adasum.combine(0 * one, other).tolist() == [0, 2]
    assert adasum.combine(np.array([1j]), np.array([1.0 + 0j])).tolist() == [1 + 1j], "orthogonal as vectors"


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("far", [0, 2, 20])
@pytest.mark.parametrize("exponent", [-300, -150, -38, -20, 0, 18, 37, 150, 300])
def test_adasum_of_tiny_and_huge_vectors(dtype, exponent, far):
    """Nothing vanishes or overflows: parallel vectors are averaged, orthogonal ones added, at any scale."""
    info = np.finfo(dtype)
    if not info.minexp < 3.4 * exponent <= 3.4 * (exponent + far) < info.maxexp - 4:
        return
    a = np.array([3, 0, 1, 0], dtype) * info.dtype.type(10.0**exponent)
    b = np.array([6, 0, 2, 0], dtype) * info.dtype.type(10.0 ** (exponent + far))
    np.testing.assert_allclose(adasum.combine(a, b), a / 2 + b / 2, 4 * info.eps)
    np.testing.assert_allclose(adasum.combine(a, np.roll(b, 1)), a + np.roll(b, 1), 4 * info.eps)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_adasum_of_tiny_and_huge_16_bit_floats(name):
    dtype = np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)
    values = [1e-7, 6e4] if name == "float16" else [1e-38, 1e38]

    def program():
        arrays = [np.full(4, value, dtype) for value in values]
        return [rr.allreduce(each, op=rr.Adasum).tolist() for each in arrays], [each.tolist() for each in arrays]

    for found, expected in run_ranks(2, program):
        assert found == expected, "equal vectors are averaged"


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_adasum_takes_a_logarithm_of_rounds(size):
    messages = []
    run_ranks(size, lambda: complete(adasum.allreduce(np.ones(10), transport())), messages=messages)
    assert len(messages) == size * (size - 1).bit_length()
    assert all(message.nbytes == 80 for message in messages)
