"""The direct all-reduce on threads: the pattern of its messages; tests/ranks/test_deterministic.py has its bits."""

import itertools
from collections import Counter

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import direct
from ringreduce.collectives.partition import chunk_bounds
from ringreduce.ops import Reduction, Sum
from tests.support.on_threads import reduced_over_messages
from tests.support.reference import SIZES, assert_reduced, data


@pytest.mark.parametrize("name", ["float16", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_each_pair_of_ranks_exchanges_its_two_chunks_raw_and_finished(size, name):
    count, messages = 1000, []
    arrays = [data(name, count, rank) for rank in range(size)]
    reduced_over_messages(direct, arrays, Reduction(Sum, TABLE[name], size), messages=messages)
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
    reduced_over_messages(direct, arrays, Reduction(Sum, TABLE["float32"], 4), messages=messages)
    for rank in range(4):
        raw = [each.destination for each in messages if each.source == rank and each.tag == direct.RAW_TAG]
        assert raw == [(rank + distance) % 4 for distance in (1, 2, 3)]


def test_many_ranks_have_shorter_segments(monkeypatch):
    monkeypatch.setattr(direct, "AHEAD_BYTES", 6 * 128)
    monkeypatch.setattr(direct, "LEAST_SEGMENT_BYTES", 32)
    longest = {}
    for size in (2, 4, 9):
        messages = []
        arrays = [data("float64", 2000, rank) for rank in range(size)]
        results = reduced_over_messages(direct, arrays, Reduction(Sum, TABLE["float64"], size), messages=messages)
        assert_reduced(results[0], Sum, arrays)
        longest[size] = max(each.nbytes for each in messages)
    assert longest == {2: 384, 4: 128, 9: 48}
