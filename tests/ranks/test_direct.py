"""The direct all-reduce on threads: results, their bits, and the pattern of its messages."""

import itertools
from collections import Counter

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import direct
from ringreduce.ops import Average, Reduction, Sum
from ringreduce.partition import chunk_bounds
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.ranks.on_threads import transport
from tests.support.reference import assert_reduced, data
from tests.support.tiers import parted

SIZES = parted(range(1, 10), lambda size: size in (1, 2, 3, 4, 7))


def reduced_by_all(arrays, reduction, messages=None, buffered=False, **options):
    """The results of all ranks, each of whom gives one of `arrays`."""

    def program():
        array = arrays[transport().rank].copy()
        complete(direct.allreduce(array.view(reduction.element.storage), transport(), reduction, **options))
        return array

    return run_ranks(len(arrays), program, messages=messages, buffered=buffered)


def folded(arrays, size, prescale, postscale):
    """The mean in float32, rank by rank, rounded once to the type of the arrays."""
    total = arrays[0].astype(np.float32) * np.float32(prescale)
    for each in arrays[1:]:
        total = total + each.astype(np.float32) * np.float32(prescale)
    return (total / np.float32(size) * np.float32(postscale)).astype(arrays[0].dtype)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_bits_are_those_of_a_sum_in_the_order_of_the_ranks(size, name):
    arrays = [data(name, 1003, rank) for rank in range(size)]
    expected = folded(arrays, size, 0.75, 3.0)
    if name == "float32" and size > 2:
        assert expected.tobytes() != folded(arrays[::-1], size, 0.75, 3.0).tobytes(), "another order has other bits"
    kind = Reduction(Average, TABLE[name], size, 0.75, 3.0)
    for segment_bytes in (6, 100, 1 << 20):
        for result in reduced_by_all(arrays, kind, segment_bytes=segment_bytes):
            assert result.tobytes() == expected.tobytes()


def test_the_bits_of_an_element_do_not_depend_on_what_travels_with_it():
    size = 3
    arrays = [data("float32", 1003, rank) for rank in range(size)]
    kind = Reduction(Sum, TABLE["float32"], size)
    whole = reduced_by_all(arrays, kind)[0]
    for low, high in ((0, 1), (17, 400), (400, 1003)):
        part = reduced_by_all([each[low:high] for each in arrays], kind)[0]
        assert part.tobytes() == whole[low:high].tobytes()


@pytest.mark.parametrize("name", ["float16", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_each_pair_of_ranks_exchanges_its_two_chunks_raw_and_finished(size, name):
    count, messages = 1000, []
    arrays = [data(name, count, rank) for rank in range(size)]
    reduced_by_all(arrays, Reduction(Sum, TABLE[name], size), messages)
    bounds = chunk_bounds(count, size)
    expected = Counter()
    for source, target in itertools.permutations(range(size), 2):
        for tag, owner in ((direct.RAW_TAG, target), (direct.FINISHED_TAG, source)):
            nbytes = (bounds[owner + 1] - bounds[owner]) * np.dtype(name).itemsize
            expected[source, target, tag, nbytes] += 1
    assert Counter(tuple(each) for each in messages) == expected


def test_no_rank_is_flooded():
    """Everybody sends a row to the rank after it first, then to the one after that."""
    messages = []
    arrays = [data("float32", 100, rank) for rank in range(4)]
    reduced_by_all(arrays, Reduction(Sum, TABLE["float32"], 4), messages)
    for rank in range(4):
        raw = [each.destination for each in messages if each.source == rank and each.tag == direct.RAW_TAG]
        assert raw == [(rank + distance) % 4 for distance in (1, 2, 3)]


def test_long_chunks_travel_in_segments():
    messages = []
    arrays = [data("float64", 101, rank) for rank in range(2)]
    reduced_by_all(arrays, Reduction(Sum, TABLE["float64"], 2), messages, segment_bytes=160)
    # chunks of 51 and 50 elements, each sent raw by one rank and finished by the other
    assert sorted(each.nbytes for each in messages) == [80] * 2 + [88] * 2 + [160] * 8


def test_many_ranks_have_shorter_segments(monkeypatch):
    monkeypatch.setattr(direct, "AHEAD_BYTES", 6 * 128)
    monkeypatch.setattr(direct, "LEAST_SEGMENT_BYTES", 32)
    longest = {}
    for size in (2, 4, 9):
        messages = []
        arrays = [data("float64", 2000, rank) for rank in range(size)]
        results = reduced_by_all(arrays, Reduction(Sum, TABLE["float64"], size), messages)
        assert_reduced(results[0], Sum, arrays)
        longest[size] = max(each.nbytes for each in messages)
    assert longest == {2: 384, 4: 128, 9: 48}
