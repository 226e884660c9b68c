"""Which stores a large operation has: those that were faster, tried in turns, now and then."""

import itertools
import random

import pytest

from ringreduce.transport.stores import (
    CLASSES,
    EVERY,
    FIRST,
    FIRST_ORDER,
    JUMP,
    LARGE_BYTES,
    ORDER,
    PLAIN,
    RESULTS,
    SLOTS,
    WAYS,
    Stores,
    StoresBySize,
)

NEAR = {PLAIN: 1.0, SLOTS: 1.6, RESULTS: 1.1, SLOTS | RESULTS: 1.7}  # µs of an operation, by what is streamed
FAR = {PLAIN: 2.0, SLOTS: 1.2, RESULTS: 2.1, SLOTS | RESULTS: 1.1}
VERY_FAR = {PLAIN: 6.7, SLOTS: 2.2, RESULTS: 6.0, SLOTS | RESULTS: 1.2}


def run(stores, took_us, operations):
    """Do so many operations; returns the way of each."""
    ways = []
    for _ in range(operations):
        ways.append(stores.begin())
        stores.end(took_us[ways[-1]])
    return ways


@pytest.mark.parametrize(("took_us", "best"), [(NEAR, PLAIN), (FAR, SLOTS | RESULTS)])
def test_the_fastest_way_is_in_use_when_each_has_been_tried(took_us, best):
    stores = Stores()
    first = run(stores, took_us, len(FIRST_ORDER) * FIRST)
    assert set(first) == set(range(WAYS))
    assert stores.way == best


def test_where_they_are_equal_stores_stay_plain():
    stores = Stores()
    run(stores, dict.fromkeys(range(WAYS), 1.0), 10 * EVERY)
    run(stores, {way: 1.0 - 0.01 * way for way in range(WAYS)}, 10 * EVERY)
    assert stores.way == PLAIN


@pytest.mark.parametrize(("before", "after"), [(NEAR, FAR), (FAR, NEAR)])
def test_cores_that_move_are_noticed(before, after):
    stores = Stores()
    run(stores, before, 20 * EVERY)
    assert stores.way == min(before, key=before.get)
    run(stores, after, (len(ORDER) + 1) * EVERY)
    assert stores.way == min(after, key=after.get)


@pytest.mark.parametrize("operations", range(20, 400, 13))
def test_cores_that_move_far_away_or_back_are_noticed_soon(operations):
    stores = Stores()
    assert run(stores, VERY_FAR, 8)[-1] == SLOTS | RESULTS, "from the start"
    stores = Stores()
    run(stores, NEAR, operations)
    run(stores, VERY_FAR, 16)
    assert stores.way == SLOTS | RESULTS
    run(stores, {way: 1.5 * took for way, took in NEAR.items()}, 24)
    assert stores.way == PLAIN, "and back"
    run(stores, VERY_FAR, 16)
    run(stores, {way: 20 * took for way, took in VERY_FAR.items()}, 10)
    run(stores, VERY_FAR, 10)
    assert stores.way == SLOTS | RESULTS, "what makes all ways as slow changes nothing"


def test_operations_that_are_slow_now_and_then_try_nothing():
    stores = Stores()
    run(stores, NEAR, 10 * EVERY)
    for number in range(10 * EVERY, 11 * EVERY):
        way = stores.begin()
        assert way == PLAIN or number % EVERY < 6
        stores.end(NEAR[way] * (2 * JUMP if number % 2 else 1))


BETWEEN_TURNS = range(EVERY + 8, 2 * EVERY - 14)


@pytest.mark.parametrize("operations", BETWEEN_TURNS)
def test_three_operations_show_that_cores_have_moved_far_away(operations):
    stores = Stores()
    run(stores, NEAR, operations)
    both = SLOTS | RESULTS
    assert run(stores, VERY_FAR, 8) == [PLAIN, PLAIN, both, PLAIN, both, both, both, both]


@pytest.mark.parametrize("operations", BETWEEN_TURNS)
def test_two_very_slow_operations_in_a_row_cost_one_trial(operations):
    stores = Stores()
    run(stores, NEAR, operations)
    run(stores, {way: 50 * took for way, took in NEAR.items()}, 2)
    ways = run(stores, NEAR, 12)
    assert sum(way != PLAIN for way in ways) <= 1
    assert stores.way == PLAIN


def test_from_far_cores_it_costs_few_slow_operations_to_know_that():
    ways = run(Stores(), VERY_FAR, EVERY)
    assert sum(VERY_FAR[way] > 2 * VERY_FAR[SLOTS | RESULTS] for way in ways[6:]) <= 1


@pytest.mark.parametrize("took_us", [NEAR, FAR])
def test_a_way_that_is_worse_by_far_is_tried_once_in_64_operations(took_us):
    stores = Stores()
    run(stores, took_us, len(ORDER) * EVERY)
    ways = run(stores, took_us, 4 * len(ORDER) * EVERY)
    best = min(took_us.values())
    slow = [way for way in ways if took_us[way] > 1.3 * best]
    assert 0 < len(slow) <= len(ways) // EVERY
    assert sum(took_us[way] for way in ways) / len(ways) < 1.02 * best


def test_one_slow_operation_decides_nothing():
    """Other programs have interrupted it."""
    for before, *interrupted in itertools.product((0, 2 * FIRST, 5 * FIRST), range(6), range(6)):
        stores = Stores()
        run(stores, NEAR, before)
        for number in range(FIRST):
            way = stores.begin()
            stores.end(NEAR[way] * (50 if number in interrupted else 1))
        assert stores.way == PLAIN, (before, interrupted)


def test_ranks_try_the_same_way_at_the_same_time():
    """Whatever is in use on each, and though each has a clock of its own."""
    draw = random.Random(7)
    ranks = [Stores() for _ in range(3)]
    for number in range(20 * EVERY):
        ways = [each.begin() for each in ranks]
        for rank, (each, way) in enumerate(zip(ranks, ways, strict=True)):
            if way != each.way:
                every, order = (FIRST, FIRST_ORDER) if number < len(FIRST_ORDER) * FIRST else (EVERY, ORDER)
                assert way == order[number // every % len(order)]
            each.end(draw.uniform(1, 1.4) * (1 + rank))


def test_sizes_learn_apart():
    by_size = StoresBySize()
    sizes = [
        each for number in range(CLASSES) for each in (LARGE_BYTES << 2 * number, (LARGE_BYTES << 2 * number + 2) - 1)
    ]
    assert [by_size.classes.index(by_size.of(each)) for each in sizes] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert by_size.of(1 << 40) is by_size.classes[-1]
    assert len(by_size.classes) == CLASSES
    assert str(by_size) == "plain"
    run(by_size.of(LARGE_BYTES), NEAR, len(FIRST_ORDER) * FIRST)
    assert str(by_size) == "plain"
    run(by_size.of(256 * LARGE_BYTES), FAR, len(FIRST_ORDER) * FIRST)
    assert str(by_size) == "plain; from 64 MiB on streaming"
    run(by_size.of(LARGE_BYTES), FAR | {SLOTS: 0.1}, len(ORDER) * EVERY)
    assert str(by_size) == "plain; from 256 KiB on slots streaming; from 64 MiB on streaming"


def test_a_size_that_is_new_begins_with_what_the_size_before_it_has_learnt():
    by_size = StoresBySize()
    run(by_size.of(LARGE_BYTES), VERY_FAR, 8)
    assert run(by_size.of(256 * LARGE_BYTES), VERY_FAR, 2 * FIRST).count(PLAIN) == 0
    run(by_size.of(LARGE_BYTES), VERY_FAR, 1)
    again = by_size.of(256 * LARGE_BYTES)
    assert (again.count, again.way) == (2 * FIRST, SLOTS | RESULTS)
    run(again, NEAR, 3 * EVERY)
    assert (again.way, by_size.of(LARGE_BYTES).way) == (PLAIN, SLOTS | RESULTS), "one that is known keeps its own"
