"""A rank's cache, and the coordinator's number allocator."""

import pytest

from ringreduce.execution.plan import Plan
from ringreduce.execution.signature import Signature
from ringreduce.negotiation.cache import Cache, Ids


def named(name, root=0):
    return Signature("broadcast", name, details=(("root_rank", root),))


def id_in(cache, signature):
    plan = Plan(signature)
    found = cache.id(plan, signature)
    assert plan.id == found
    return found


def test_exactly_what_was_learned_has_a_number():
    cache = Cache()
    cache.learn(4, named("a"))
    assert id_in(cache, named("a")) == 4
    assert id_in(cache, named("a", root=1)) is None
    assert cache.id_of_key(named("a", root=9)) == 4
    assert id_in(cache, named("b")) is None
    assert cache.id_of_key(named("b")) is None
    assert cache[4] == named("a")
    assert len(cache) == 1


def test_unnamed_signatures_are_found_by_all_but_their_number():
    def unnamed(number, root):
        return named(f"unnamed.{number}", root)._replace(numbered=True)

    cache = Cache()
    cache.learn(0, unnamed(1, root=0).unnumbered)
    cache.learn(1, unnamed(1, root=1).unnumbered)
    assert [id_in(cache, unnamed(7, root)) for root in (0, 1, 2)] == [0, 1, None]
    assert id_in(cache, named("unnamed")) is None, "a user's own name"


def test_what_is_forgotten_is_unknown_and_its_number_free():
    cache = Cache()
    cache.learn(4, named("a"))
    cache.forget(4)
    assert id_in(cache, named("a")) is None
    assert len(cache) == 0
    with pytest.raises(KeyError):
        cache[4]
    cache.learn(4, named("b"))
    assert cache[4] == named("b")


def test_a_plan_has_its_id_until_that_is_forgotten_or_an_equal_one_asks():
    cache, signature = Cache(), named("a")
    plans = [Plan(signature), Plan(named("a"))]
    cache.learn(4, signature)
    assert [cache.id(each, signature) for each in plans] == [4, 4]
    assert [each.id for each in plans] == [None, 4], "of equal ones that of the last, so that forgetting finds it"
    cache.forget(4)
    assert plans[1].id is None
    cache.learn(5, signature)
    assert [cache.id(each, signature) for each in plans] == [5, 5]


def filled(count, capacity=8):
    ids, cache = Ids(capacity), Cache()
    for number in range(count):
        assert ids.allocate() == number
        cache.learn(number, named(f"t{number}"))
    return ids, cache


def test_the_least_recently_used_are_forgotten_to_make_room():
    ids, cache = filled(5, capacity=6)
    ids.use([0, 1])
    assert ids.least_used(cache, 1) == []
    assert ids.least_used(cache, 3) == [2, 3]
    assert ids.least_used(cache, 99) == [2, 3, 4, 0, 1]
    ids.retire([2], 7)
    cache.forget(2)
    assert ids.least_used(cache, 3) == [3], "that of which not all have read makes room, too"


def test_an_id_is_given_again_when_all_have_read_that_it_was_forgotten():
    ids, _ = filled(3, capacity=3)
    assert ids.allocate() is None
    ids.retire([0], 7)
    ids.retire([1], 9)
    ids.read(6)
    assert ids.allocate() is None
    ids.read(8)
    assert [ids.allocate(), ids.allocate()] == [0, None]
    ids.read(9)
    assert [ids.allocate(), ids.allocate()] == [1, None]
