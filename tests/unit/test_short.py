"""Short all-reduces whose elements travel with their readiness: when a leader has a sum, and when it has none."""

import numpy as np
import pytest

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import TABLE
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.protocol import Ready
from ringreduce.negotiation.short import Short
from ringreduce.ops import Max, Sum

X, Y = 3, 5


def submission(values=(1, 2, 4), waits=True, op=Sum):
    array = np.array(values, np.float32)
    buffer = Buffer(array, TABLE["float32"], array.shape, "cpu", array.dtype)
    details = ("op", op.value), ("prescale_factor", 1.0), ("postscale_factor", 1.0)
    signature = Signature("allreduce", "x", details=details)
    return Submission(signature, 0, [buffer], [buffer], lambda _: None, None, "line", waits)


def ready(values, ids=(X,)):
    return Ready(0, list(ids), [], 0, np.array(values, np.float32).tobytes())


def leader(children=(), most_bytes=12):
    return Short(most_bytes, children)


def summed(short, counted=None, ids=(X,)):
    return np.frombuffer(short.partial(list(ids), counted or [submission()]), np.float32).tolist()


def test_the_sum_of_a_subtree_and_the_caller_s_elements_stay():
    own, short = submission(), leader([1, 2])
    short.receive(2, ready([10, 20, 40]))
    short.receive(1, ready([100, 200, 400]))
    assert summed(short, [own]) == [111, 222, 444]
    assert own.inputs[0].flat.tolist() == [1, 2, 4]
    assert summed(leader()) == [1, 2, 4], "a leaf's is its own"


def test_a_sum_is_used_once():
    short = leader([1])
    short.receive(1, ready([10, 20, 40]))
    assert summed(short) == [11, 22, 44]
    assert summed(short) == []


@pytest.mark.parametrize(
    "last",
    [ready([10, 20, 40], [Y]), Ready(0, [Y], [], 0), Ready(0, [], [X], 0)],
    ids=["a sum of another id", "another id", "withdrawn"],
)
def test_a_child_that_has_reported_anything_since_has_no_sum(last):
    short = leader([1])
    short.receive(1, ready([10, 20, 40]))
    short.receive(1, last)
    assert summed(short) == []


@pytest.mark.parametrize(
    ("counted", "ids"),
    [
        ([submission(waits=False)], [X]),
        ([submission([1, 2, 4, 8])], [X]),
        ([submission(), submission()], [X]),
        ([submission(), submission()], [X, X]),
        ([submission()], [X, Y]),
    ],
    ids=["nobody waits", "long", "submitted twice", "ready twice", "two ids"],
)
def test_there_is_no_sum(counted, ids):
    assert summed(leader(), counted, ids) == []


def test_a_child_without_a_sum_leaves_none():
    short, own = leader([1, 2]), [submission(op=Max)]
    short.receive(1, ready([10, 0, 40]))
    assert summed(short, own) == []
    short.receive(1, ready([10, 0, 40]))
    short.receive(2, ready([0, 20, 0]))
    assert summed(short, own) == [10, 20, 40]
