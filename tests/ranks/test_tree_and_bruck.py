"""The tree's broadcast and Bruck's allgather on threads: results, and the pattern of their messages."""

import itertools
from collections import Counter

import numpy as np
import pytest

from ringreduce.collectives import bruck, tree
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support.on_threads import transport
from tests.support.reference import SIZES, data


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
