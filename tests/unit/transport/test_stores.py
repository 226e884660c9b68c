"""Which stores a large operation has: those that were faster, tried in turns, now and then."""

import itertools
import random

import pytest

from ringreduce.transport.stores import (
    CLASSES,
    EVERY,
    FIRST,
    LARGE_BYTES,
    PLAIN,
    RESULTS,
    SLOTS,
    WAYS,
    Stores,
    StoresBySize,
)

NEAR = {PLAIN: 1.0, SLOTS: 1.6, RESULTS: 1.1, SLOTS | RESULTS: 1.7}  # µs of an operation, by what is streamed
FAR = {PLAIN: 2.0, SLOTS: 1.2, RESULTS: 2.1, SLOTS | RESULTS: 1.1}


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
    first = run(stores, took_us, WAYS * FIRST)
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
    run(stores, after, (WAYS + 1) * EVERY)
    assert stores.way == min(after, key=after.get)


@pytest.mark.parametrize("took_us", [NEAR, FAR])
def test_a_way_that_is_worse_by_far_is_tried_once_in_64_operations(took_us):
    stores = Stores()
    run(stores, took_us, WAYS * EVERY)
    ways = run(stores, took_us, 4 * WAYS * EVERY)
    best = min(took_us.values())
    slow = [way for way in ways if took_us[way] > 1.3 * best]
    assert 0 < len(slow) <= len(ways) // EVERY
    assert sum(took_us[way] for way in ways) / len(ways) < 1.02 * best


def test_one_slow_operation_decides_nothing():
    """Other programs have interrupted it."""
    for interrupted in itertools.product(range(6), repeat=2):
        stores = Stores()
        run(stores, NEAR, FIRST)
        for number in range(FIRST):
            way = stores.begin()
            stores.end(NEAR[way] * (50 if number in interrupted else 1))
        assert stores.way == PLAIN, interrupted


def test_ranks_try_the_same_way_at_the_same_time():
    """Whatever is in use on each, and though each has a clock of its own."""
    draw = random.Random(7)
    ranks = [Stores() for _ in range(3)]
    for number in range(20 * EVERY):
        ways = [each.begin() for each in ranks]
        for rank, (each, way) in enumerate(zip(ranks, ways, strict=True)):
            if way != each.way:
                tried = number // (FIRST if number < WAYS * FIRST else EVERY) % WAYS
                assert way == tried
            each.end(draw.uniform(1, 2) + rank)


def test_sizes_learn_apart():
    by_size = StoresBySize()
    sizes = [LARGE_BYTES, 4 * LARGE_BYTES - 1, 4 * LARGE_BYTES, 16 * LARGE_BYTES - 1, 16 * LARGE_BYTES, 1 << 40]
    assert [by_size.classes.index(by_size.of(each)) for each in sizes] == [0, 0, 1, 1, 2, 2]
    assert len(by_size.classes) == CLASSES
    assert str(by_size) == "plain"
    run(by_size.of(LARGE_BYTES), NEAR, WAYS * FIRST)
    assert str(by_size) == "plain"
    run(by_size.of(16 * LARGE_BYTES), FAR, WAYS * FIRST)
    assert str(by_size) == "plain; from 64 MiB on streaming"
    run(by_size.of(LARGE_BYTES), FAR | {SLOTS: 0.1}, WAYS * EVERY)
    assert str(by_size) == "plain; from 4 MiB on slots streaming; from 64 MiB on streaming"
