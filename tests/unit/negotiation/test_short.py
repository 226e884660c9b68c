"""Short all-reduces whose elements travel with their readiness: when a leader has a sum, and when it has none."""

import numpy as np
import pytest

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives.ops import Average, Max, Sum
from ringreduce.execution.signature import Signature
from ringreduce.execution.submission import Submission
from ringreduce.negotiation.protocol import Ready
from ringreduce.negotiation.short import Short
from ringreduce.runtime.arguments import details_of
from ringreduce.transport.counters import HELD, Counters, GroupBlock, Held, group_bytes
from tests.support.loops import in_a_loop

X, Y = 3, 5


def submission(values=(1, 2, 4), waits=True, op=Sum):
    array = np.array(values, np.float32)
    buffer = Buffer(array, TABLE["float32"], array.shape, "cpu", array.dtype)
    signature = Signature("allreduce", "x", details=details_of(op, 1.0, 1.0))
    return Submission(signature, 0, [buffer], [buffer], lambda _: None, None, "line", waits)


def ready(values, ids=(X,)):
    return Ready(0, list(ids), [], 0, np.array(values, np.float32).tobytes())


def leader(children=(), most_bytes=12, is_root=False):
    return Short(most_bytes, 4, children, is_root)


def group():
    """The other rank of a host: its counters, and its elements as the leader sees them."""
    blocks = [GroupBlock(np.zeros(group_bytes(8), np.uint8), 8) for _ in range(2)]
    return Counters(blocks, 1, lambda: None), [Held(blocks[1], lambda: None)]


def summed(short, counted=None, ids=(X,), times=1, group=()):
    return np.frombuffer(short.partial(list(ids), counted or [submission()], times, group), np.float32).tolist()


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


@in_a_loop(
    ("counted", "ids"),
    [
        ([submission(waits=False)], [X]),
        ([submission([1, 2, 4, 8])], [X]),
        ([submission(), submission()], [X]),
        ([submission(), submission()], [X, X]),
        ([submission()], [X, Y]),
    ],
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


def test_the_sum_of_a_host_and_the_root_s_result():
    member, held = group()
    member.submit([X], leader().elements(submission([10, 20, 40])))
    assert summed(leader(), group=held) == [11, 22, 44]
    assert summed(leader(is_root=True), [submission(op=Average)], group=held) == [2.75, 5.5, 11]


@in_a_loop(
    ("last", "times"),
    [([X], 2), ([Y], 1), ([X, Y], 2), ([], 2)],
)
def test_a_rank_whose_elements_are_not_of_the_submission_that_is_ready_leaves_no_sum(last, times):
    member, held = group()
    member.submit([X], leader().elements(submission()))
    if last:
        member.submit(last, leader().elements(submission(waits=False)))
    assert summed(leader(), times=times, group=held) == []
    member.submit([X], leader().elements(submission([1, 1, 1])))
    assert summed(leader(), times=1 + last.count(X) + 1, group=held) == [2, 3, 5]


def test_elements_that_are_overwritten_while_the_leader_reads_them_are_not_used():
    blocks = [GroupBlock(np.zeros(group_bytes(8), np.uint8), 8) for _ in range(2)]
    member, fences = Counters(blocks, 1, lambda: None), []

    def overwrite():
        fences.append(None)
        if len(fences) == 1:
            member.submit([Y], leader().elements(submission([7, 7, 7])))

    member.submit([X], leader().elements(submission()))
    assert summed(leader(), group=[Held(blocks[1], overwrite)]) == []
    assert blocks[1].words[HELD]
