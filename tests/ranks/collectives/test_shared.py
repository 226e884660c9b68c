"""All-reduce through shared memory on threads: results, their bits, and that nobody overwrites what is still read."""

import itertools
import random

import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import shared
from ringreduce.collectives.cost_model import ONE_SHOT_BYTES, is_one_shot
from ringreduce.collectives.ops import Product, Reduction, Sum
from ringreduce.collectives.partition import chunk_bounds
from ringreduce.collectives.shared import COPY, DONE, PACK, REDUCE, cut
from ringreduce.transport.base import complete
from ringreduce.transport.window import Region
from tests.support.reference import SIZES, assert_reduced, data, folded
from tests.support.slots import SLOT_BYTES, on_a_host, random_plan, reduced, slots_of
from tests.support.tiers import parted


def reduce(array, region, reduction, capacity=10**9, pieces=1, in_place=True, watch=None):
    """A rank's result; both memories are its own again at once, and it writes nonsense there."""
    capacity = min(capacity, SLOT_BYTES // array.itemsize)
    options = [watch] if watch else []

    def run(slots):
        complete(shared.allreduce(slots, region, reduction, *options))

    return reduced(array, reduction.element.storage, capacity, pieces, in_place, run)


def assert_all_got(results, op, arrays):
    """The reduction of the arrays, on every rank, with the bits of a sum in the order of the ranks."""
    assert_reduced(results[0], op, arrays)
    expected = folded(op, arrays)
    if op is Product and expected.dtype.kind == "c":
        expected = results[0]  # NumPy multiplies a single complex number with other bits than one of several
    for result in results:
        assert result.tobytes() == expected.tobytes()


def run_plan(size, plan, slow):
    """Operations one after the other, for which no rank waits; `plan`: dtype, op, count and further arguments."""
    everyones = [[data(name, count, rank, k) for rank in range(size)] for k, (name, _, count, _) in enumerate(plan)]

    def program(region):
        return [
            reduce(arrays[region.rank], region, Reduction(op, TABLE[name], size), **options)
            for arrays, (name, op, _, options) in zip(everyones, plan, strict=True)
        ]

    results = on_a_host(size, program, slow)
    for k, (_, op, _, _) in enumerate(plan):
        assert_all_got([each[k] for each in results], op, everyones[k])


@pytest.mark.parametrize("seed", parted(range(4), lambda seed: seed < 2))
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_that_is_late_never_reads_what_came_later(size, seed):
    """Every operation has data of its own, so memory that was overwritten too early gives another result."""
    run_plan(size, random_plan(seed, 40, [0, 1, 5, 40, 300, 3000, 30000]), slow=seed)


@pytest.mark.parametrize("capacity", [10**9, 16])
def test_the_phases_of_a_slot_are_told_in_order_and_at_the_end_its_results_are_there(capacity):
    arrays = [data("float32", 100, rank) for rank in range(3)]
    expected = folded(Sum, arrays)

    def program(region):
        story, early = [], []
        flat = arrays[region.rank].copy()
        slots = slots_of(flat, flat, min(capacity, 1000), 4)

        def watch(number, phase):
            story.append((number, phase))
            if phase == DONE:
                low = number * capacity
                early.append(flat[low : low + capacity].tobytes() == expected[low : low + capacity].tobytes())

        complete(shared.allreduce(slots, region, Reduction(Sum, TABLE["float32"], 3), watch))
        return story, early, len(slots)

    for story, early, slots in on_a_host(3, program):
        assert early == [True] * slots
        assert [number for number, phase in story if phase == DONE] == list(range(slots))
        for number in range(slots):
            assert [phase for each, phase in story if each == number] == [PACK, REDUCE, COPY, DONE]


@pytest.mark.parametrize("size", [2, 3, 9])
def test_short_ones_take_one_wait_and_long_ones_two(size):
    limit = ONE_SHOT_BYTES // (size - 1) // 4

    def program(region):
        waits = []
        region.arrived = lambda flag, sequence: waits.append(flag) or Region.arrived(region, flag, sequence)
        counts = []
        for count in (limit, limit + 1):
            waits.clear()
            reduce(data("float32", count, region.rank), region, Reduction(Sum, TABLE["float32"], size))
            counts.append(len(set(waits)))
        return counts

    assert is_one_shot(4 * limit, size)
    assert not is_one_shot(4 * limit + 4, size)
    assert on_a_host(size, program) == [[1, 2]] * size


@pytest.mark.parametrize("size", SIZES)
def test_parts_are_cut_at_the_bounds_of_chunks(size):
    for seed in range(30):
        draw = random.Random(seed)
        lengths = tuple(draw.choice([0, 1, 2, 3, size, 50]) for _ in range(draw.randint(0, 9)))
        starts = [0, *itertools.accumulate(lengths)]
        bounds = chunk_bounds(starts[-1], size)
        covered = []
        for owner, part, low, high, first, last in cut(lengths, size):
            assert bounds[owner] <= low < high <= bounds[owner + 1]
            assert (low, high) == (starts[part] + first, starts[part] + last)
            assert last <= lengths[part]
            covered += range(low, high)
        assert covered == list(range(starts[-1]))
