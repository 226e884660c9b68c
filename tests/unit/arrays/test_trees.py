import collections
from typing import NamedTuple

import pytest

from ringreduce.arrays.trees import leaves, map_leaves, named_leaves
from ringreduce.errors import InputError


class Layer(NamedTuple):
    w: int
    b: int


def test_leaves_are_named_by_their_place_and_ordered_by_name():
    tree = {"b": [1, (2, None)], "a": Layer(3, 4), 5: 6}
    assert list(leaves(tree)) == [("5", 6), ("a.0", 3), ("a.1", 4), ("b.0", 1), ("b.1.0", 2)]
    assert list(leaves(7)) == [("", 7)]


class Optimizer:
    """Some keep their own attributes, to log them."""

    def __init__(self):
        self.rate, self.also, self.options = 5, [6], self.__dict__


def test_what_is_inside_itself_has_its_leaves_once_and_cannot_be_made_anew():
    own = [1, {"b": 2}]
    own[1]["again"], shared = own, [3]
    assert list(leaves(own)) == [("0", 1), ("1.b", 2)]
    assert list(leaves(vars(Optimizer()))) == [("also.0", 6), ("rate", 5)]
    assert list(leaves([shared, shared])) == [("0.0", 3), ("1.0", 3)]
    assert map_leaves([shared, shared], lambda _, leaf: -leaf) == [[-3], [-3]]
    with pytest.raises(InputError, match=r"'1\.again' is the list that it is in; pass a tree of arrays"):
        map_leaves(own, lambda _, leaf: leaf)


@pytest.mark.parametrize("tree", [{"a.b": 1, "a": {"b": 2}}, {1: 3, "1": 4}])
def test_two_leaves_of_one_name_are_refused(tree):
    with pytest.raises(InputError, match=r"more than one array is called '(a.b|1)'; rename the keys"):
        named_leaves(tree)


def test_replacing_keeps_the_form_and_the_types():
    tree = {"b": [1, (2, None)], "a": Layer(3, 4)}
    values = dict(leaves(tree))
    replaced = map_leaves(tree, lambda name, leaf: -leaf if leaf == values[name] else name)
    assert replaced == {"b": [-1, (-2, None)], "a": Layer(-3, -4)}
    assert isinstance(replaced["a"], Layer)
    assert list(replaced) == ["b", "a"]


@pytest.mark.parametrize("kind", [collections.Counter, collections.OrderedDict, dict])
def test_what_is_a_dict_keeps_its_kind_and_gets_the_new_leaves(kind):
    tree = kind({"b": 3, "a": 4})
    replaced = map_leaves(tree, lambda _, leaf: 10 * leaf)
    assert (type(replaced), dict(replaced), list(replaced)) == (kind, {"b": 30, "a": 40}, ["b", "a"])
    assert tree == {"b": 3, "a": 4}
