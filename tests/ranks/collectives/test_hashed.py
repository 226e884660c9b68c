"""A short all-reduce that finds out whether all ranks mean the same one, on threads."""

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import doubling, hashed
from ringreduce.collectives.cost_model import SHORT_BYTES
from ringreduce.collectives.ops import Reduction, Sum
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support.on_threads import each_rank_of, transport
from tests.support.reference import data

SIZES = pytest.mark.parametrize("size", range(1, 8))
SAME = -(1 << 62) - 7


def program(numbers, lengths, directly=False):
    """On one rank: what comes out, and what went in afterwards."""
    size, rank = len(numbers), transport().rank
    reduction, mine = Reduction(Sum, TABLE["float32"], size), data("float32", lengths[rank], rank)
    if directly:
        complete(doubling.allreduce(mine, transport(), reduction))
        return mine
    found = complete(hashed.allreduce(numbers[rank], mine, transport(), reduction.combine))
    np.testing.assert_array_equal(mine, data("float32", lengths[rank], rank))
    return found


@SIZES
@pytest.mark.parametrize("length", [0, 1, 3, SHORT_BYTES // 4])
@pytest.mark.parametrize("number", [SAME, 0])
def test_the_sum_has_the_bits_of_doubling(size, length, number):
    found = run_ranks(size, lambda: program([number] * size, [length] * size))
    expected = run_ranks(size, lambda: program([number] * size, [length] * size, directly=True))
    assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]


@pytest.mark.parametrize("size", range(2, 8))
def test_one_rank_that_means_another_is_noticed_by_all(size):
    """Whichever it is, and whether its elements are more, fewer or none."""
    for odd in range(size):
        for length, others in [(5, 5), (SHORT_BYTES // 4, 1), (0, 7), (7, 0)]:
            numbers, lengths = [SAME] * size, [others] * size
            numbers[odd], lengths[odd] = SAME + 1, length
            found = run_ranks(size, lambda: program(numbers, lengths))  # noqa: B023, it ends here
            assert found == [None] * size, f"rank {odd} of {size} with {length} elements, the others with {others}"


def test_ranks_that_all_mean_others():
    assert run_ranks(4, lambda: program([1, 2, 3, 4], [1, 2, 3, 4])) == [None] * 4
    assert run_ranks(4, lambda: program([1, 1, 2, 2], [3] * 4)) == [None] * 4


def messages_of(count, elements, hosts):
    """What `count` sums in order, of so many elements, send more than none."""

    def sums(count, hosts):
        messages = []

        def steps():
            channel = rr.ordered()
            for number in range(count):
                mine = np.arange(elements) + 10.0 * rr.rank() + number
                expected = len(hosts) * (np.arange(elements) + number) + 10.0 * sum(range(len(hosts)))
                assert (channel.allreduce(mine, op=rr.Sum) == expected).all()

        run_ranks(len(hosts), steps, hosts=hosts, messages=messages)
        return sorted(each.nbytes for each in messages)

    before, after = sums(0, hosts), sums(count, hosts)
    return [nbytes for nbytes in set(after) for _ in range(after.count(nbytes) - before.count(nbytes))]


@pytest.mark.parametrize("hosts", [[0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3], [3, 0, 1, 1, 2, 0, 1]], ids=str)
def test_a_short_sum_between_hosts_needs_no_messages_but_those_of_its_hash(hosts):
    assert messages_of(3, 5, hosts) == [8 + 8 * 5] * 2 * 4 * 3
    long = messages_of(1, SHORT_BYTES // 8 + 1, hosts)
    assert long.count(8) == 2 * 4
    assert len(long) > 2 * 4


@each_rank_of(3, hosts=[0, 1, 2])
def test_the_caller_s_elements_stay_and_are_scaled_before_and_after():
    mine = np.arange(5.0) + 100 * rr.rank()
    found = rr.ordered().allreduce(mine, op=rr.Average, prescale_factor=2.0, postscale_factor=3.0)
    assert mine.tolist() == (np.arange(5.0) + 100 * rr.rank()).tolist()
    assert found.tolist() == (6 * (np.arange(5.0) + 100)).tolist()
