"""A rank's cache, and the coordinator's number allocator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.execution.signature import Signature
from ringreduce.negotiation.cache import Cache, NumberAllocator, numbers


def named(name, root=0):
    return Signature("broadcast", name, details=(("root_rank", root),))


@given(st.sets(st.integers(0, 300)))
def test_numbers_of_bits(chosen):
    assert list(numbers(sum(1 << number for number in chosen))) == sorted(chosen)


def test_exactly_what_was_learned_has_a_number():
    cache = Cache()
    cache.learn(4, named("a"))
    assert cache.number(named("a")) == 4
    assert cache.number(named("a", root=1)) is None
    assert cache.number_of_key("broadcast.a") == 4
    assert cache.number(named("b")) is None
    assert cache.number_of_key("broadcast.b") is None
    assert cache[4] == named("a")
    assert len(cache) == 1


def test_a_new_description_replaces_the_old_one():
    cache = Cache()
    cache.learn(4, named("a"))
    cache.learn(4, named("a", root=1))
    assert cache.number(named("a")) is None
    assert cache.number(named("a", root=1)) == 4
    assert len(cache) == 1


def test_what_is_forgotten_is_unknown_and_its_number_free():
    cache = Cache()
    cache.learn(4, named("a"))
    cache.forget(4)
    assert cache.number(named("a")) is None
    assert len(cache) == 0
    with pytest.raises(KeyError):
        cache[4]
    cache.learn(4, named("b"))
    assert cache[4] == named("b")


def filled(count, capacity=8):
    allocator, cache = NumberAllocator(capacity), Cache()
    for number in range(count):
        assert allocator.allocate() == number
        cache.learn(number, named(f"t{number}"))
    return allocator, cache


def test_the_longest_unused_are_taken_back_first_but_none_that_is_busy():
    allocator, cache = filled(5)
    allocator.use(0b00011)
    assert allocator.evict(2, busy=0b00100, response=7, cache=cache) == [3, 4]
    assert len(allocator) == 3
    assert allocator.evict(9, busy=0b00100, response=7, cache=cache) == [0, 1]
    assert allocator.evict(0, busy=0, response=7, cache=cache) == []


def test_a_number_is_given_again_when_all_have_read_that_it_was_taken_back():
    allocator, cache = filled(3)
    assert allocator.evict(1, busy=0, response=7, cache=cache) == [0]
    assert allocator.evict(1, busy=0, response=9, cache=cache) == [1]
    allocator.seen_by_all(6)
    assert allocator.former == {0: named("t0"), 1: named("t1")}
    assert allocator.allocate() == 3
    allocator.seen_by_all(8)
    assert allocator.former == {1: named("t1")}
    assert allocator.allocate() == 0
    assert allocator.allocate() == 4
    allocator.seen_by_all(9)
    assert allocator.former == {}
    assert allocator.allocate() == 1
