"""Which collections ringreduce.dask.map takes together, without Dask; jobs: end_to_end/test_in_engines.py."""

import sys
import types

import numpy as np
import pytest

from ringreduce.dask import chunks
from ringreduce.errors import InputError
from tests.support.loops import in_a_loop


class Frame:
    """A dataframe of Dask, or what looks like it: its parts, and where it is divided."""

    ndim, _meta = 2, None

    def __init__(self, rows, divisions=()):
        self.parts = [types.SimpleNamespace(shape=(each, 2)) for each in rows]
        self.divisions, self.known_divisions, self.npartitions = divisions, bool(divisions), len(rows)

    def to_delayed(self):
        return self.parts


class Array(Frame):
    def __init__(self, rows):
        super().__init__(rows)
        self.chunks, self.shape, self.numblocks = (rows, (2,)), (sum(rows), 2), (len(rows), 1)

    def rechunk(self, chunks):
        return self


CLIENT = types.SimpleNamespace(map=lambda function, parts: [*map(function, parts)], gather=lambda results: results)


def take(*collections):
    """Do what `map` does before ranks begin."""
    parts = [chunks._parts(each, number, collections[0]) for number, each in enumerate(collections)]
    chunks._compare_rows(CLIENT, collections, parts)


@in_a_loop(
    "collections",
    [
        (Frame((5, 3)), Frame((5, 3))),
        (Frame((5, 3), (0, 5, 9)), Frame((2, 7), (0, 5, 9))),  # rows belong together by their index
        (Frame((5, 3), (0, 5, 9)), Frame((5, 3)), Array((5, 3))),
        (Array((5, 3)), Array((5, 3)), Frame((5, 3))),
    ],
)
def test_parts_that_belong_together_are_taken(collections):
    take(*collections)


@in_a_loop(
    ("collections", "message"),
    [
        (
            (Frame((5, 3), (0, 5, 9)), Frame((5, 3), (0, 2, 9))),
            r"collection 1 is divided at 2 where the first one is at 5; repartition it, or clear_divisions\(\)",
        ),
        (
            (Frame((5, 3), (0, 5, 9)), Frame((5, 3)), Frame((5, 4))),
            "partition 1 of collection 2 has 4 rows, and that of the first one 3; rechunk or repartition",
        ),
        ((Frame((5, 3)), Array((4, 4))), "partition 0 of collection 1 has 4 rows, and that of the first one 5"),
        ((Array((4, 4)), Array((4, 5))), "collection 1 has 9 rows; expected 8, as in the first one"),
        ((Array((4, 4)), Frame((4, 5))), "partition 1 of collection 1 has 5 rows, and that of the first one 4"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(collections, message):
    with pytest.raises(InputError, match=f"^map: {message}"):
        take(*collections)


class Bag:
    def to_delayed(self):
        return []


class Delayed(Bag):
    """As Dask's, it has any attribute, and no truth."""

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return Delayed()

    def __bool__(self):
        raise TypeError


@in_a_loop("other", [Bag(), Delayed(), np.ones(3), [Array((3,))]])
def test_what_is_no_array_and_no_dataframe_of_dask_is_refused(other):
    for number, collections in enumerate([(other,), (Array((3,)), other)]):
        kind = type(other).__name__
        with pytest.raises(
            InputError, match=f"^map: collection {number} is a {kind}; expected an array or a dataframe"
        ):
            take(*collections)


def test_chunks_stay_where_they_lie_and_those_that_lie_nowhere_are_spread(monkeypatch):
    def computed(parts):
        return [types.SimpleNamespace(key=f"{rows.shape[0]}", status="finished", shape=rows.shape) for rows in parts]

    lies = {"1": ["b"], "2": ["b"], "3": ["gone", "a"]}
    client = types.SimpleNamespace(**vars(CLIENT), compute=computed, who_has=lambda parts: lies)
    monkeypatch.setitem(sys.modules, "distributed", types.SimpleNamespace(wait=lambda futures: None))
    held = chunks._held(client, ["a", "b"], [Array((1, 2, 3, 4, 5, 6))] * 2)
    keys = [[[part.key for part in column] for column in columns] for columns in held]
    assert keys == [[["3", "4", "5"]] * 2, [["1", "2", "6"]] * 2]
