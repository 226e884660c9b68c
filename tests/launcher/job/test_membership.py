"""Who is in the world of an elastic job, decided from what was heard: words, and what only a part of a job shows.

Whole jobs, in which anything is lost at any point: tests/unit/runtime/test_simulated_membership.py.
"""

import math
import tracemalloc

from ringrun.connection.wire import Membership
from ringrun.elastic import Elastic
from ringrun.job.membership import CannotGoOn, Kill, Members, Wake
from tests.support.loops import in_a_loop

LOST = [("lost", {1: "a"}, 0.0), ("lost", {2: "b"}, 4.0)]
MET_EARLY = [*LOST[:1], *[("reformed", rank, 1) for rank in (0, 3)], ("left", 3, 0.0), ("meets", 0, 1, 1.0)]
"""Rank 0 needs another list, since rank 3 has left, when rank 2 has yet to say that this one works."""
WORKS = [("reformed", rank, 1) for rank in (0, 2, 3)]
WRAPPED = "a script survives a loss only inside a function that ringreduce's elastic.run wraps"


def members(size=4, **options):
    made = Members(size, Elastic(stalled_s=20.0, **options))
    made.initialized()
    return made


def test_a_spare_that_is_lost_is_no_failure_of_the_job_s():
    made = members(size=3, spares=1, max_failures=0)
    assert made.lost({2: "a"}, 0.0) is None
    assert (made.number, made.ranks) == (0, (0, 1))
    assert made.lost({1: "b"}, 1.0) == CannotGoOn("--max-failures 0: 1 rank failed")


@in_a_loop(
    ("options", "heard", "decision"),
    [
        # why it cannot go on
        ({"min_np": 3}, LOST, "2 ranks left, and --min-np is 3"),
        ({"size": 3}, [*LOST, ("lost", {0: "c"}, 5.0)], "0 ranks left, and --min-np is 1"),
        ({"max_failures": 1}, LOST, "--max-failures 1: 2 ranks failed"),
        (
            {"size": 3, "spares": 1},
            [*LOST[:1], ("lost", {0: "c"}, 5.0)],
            "only spares (rank 2) are left, which have no state to continue from",
        ),
        (
            {},
            [*LOST, ("reformed", 0, 2), ("expired", 24.0), ("expired", 44.0)],
            "rank 3 did not continue within 40 s after the loss of ranks 1-2",
        ),
        (
            {"min_np": 3},
            [("ended", 1, 0.0), ("ended", 2, 0.0), ("suspected", 0, [2])],
            "rank 0 waits for rank 2, which ended with exit code 0",
        ),
        ({}, [*LOST, ("blamed", 2)], f"rank 2 did not catch the loss of rank 1; {WRAPPED}"),
        # which list comes
        ({"spares": 1}, [("left", 0, 0.0), *LOST[:1]], Membership(1, (2,), {"1": "a"})),
        ({"size": 3}, [("left", 0, 0.0), ("ended", 0, 0.0)], Membership(1, (1, 2), {"0": "ended with exit code 0"})),
        ({"size": 3}, [*LOST[:1], ("left", 0, 0.0)], Membership(2, (2,), {"1": "a"})),
        ({"size": 3}, [("left", 0, 0.0), ("meets", 1, 0, 1.0), ("another", 1.0)], Membership(1, (1, 2), {})),
        ({"size": 3}, [("meets", 1, 0, 1.0), ("left", 0, 2.0), ("another", 2.0)], Membership(1, (1, 2), {})),
        (
            {"size": 3},
            [("left", 0, 0.0), *2 * [("meets", 1, 0, 1.0), ("another", 1.0)], ("meets", 2, 0, 1.0), ("another", 1.0)],
            None,
        ),
        ({"size": 3}, [("meets", 1, 0, 1.0), ("another", 1.0)], None),
        ({}, [*MET_EARLY, ("another", 1.0)], None),
        ({}, [*LOST[:1], ("meets", 0, 1, 1.0), *WORKS, ("left", 3, 2.0), ("another", 2.0)], None),
        ({}, [*MET_EARLY, ("reformed", 2, 1), ("another", 2.0)], Membership(2, (0, 2), {"1": "a"})),
        ({}, [("lost", {2: "a"}, 5.0), ("lost", {2: "ended"}, 6.0)], None),
        # nobody is left to hear of one
        ({"size": 2}, [("left", 0, 0.0), ("left", 1, 0.0), ("ended", 0, 0.0), ("lost", {1: "a"}, 0.0)], None),
        ({"size": 2}, [("ended", 0, 0.0), ("ended", 1, 0.0), ("expired", 100.0)], None),
        # who says of which list that it works
        ({}, [*LOST, ("reformed", 0, 2), ("reformed", 3, 1)], False),
        ({}, [*LOST, ("reformed", 0, 2), ("reformed", 3, 2)], True),
        (
            {"size": 3},
            [*LOST[:1], ("reformed", 0, 1), ("reformed", 2, 1), ("lost", {0: "b"}, 0.0), ("blamed", 0)],
            None,
        ),
        # all others leave, and wait for one that ends with 0 without leaving
        (
            {},
            [*[("left", rank, 1.0) for rank in (0, 2, 3)], ("ended", 1, 2.0)],
            Membership(1, (), {"1": "ended with exit code 0"}),
        ),
        ({}, [*[("left", rank, 1.0) for rank in range(4)], ("ended", 1, 2.0)], None),
        ({}, [("ended", rank, 1.0) for rank in range(4)], None),
        # who keeps others waiting
        ({}, [("lost", {3: "a"}, 0.0), ("suspected", 0, [2, 3])], Kill(frozenset({2}))),
        ({}, [("suspected", 0, [2]), ("suspected", 1, [2])], None),
        ({}, [("suspected", 0, [2]), ("suspected", 2, [0, 1])], None),
        ({}, [("lost", {3: "a"}, 0.0), ("suspected", 3, [1])], None),
        ({}, [("suspected", 0, [0])], Kill(frozenset({0}))),
        (
            {},
            [("ended", 1, 1.0), ("meets", 2, 1, 5.0), ("meets", 2, 1, 24.0), ("reformed", 3, 1), ("expired", 25.0)],
            Kill(frozenset({0})),
        ),
    ],
)
def test_what_is_decided_last(options, heard, decision):
    job = members(**options)
    last = [getattr(job, name)(*arguments) for name, *arguments in heard][-1]
    assert last == (CannotGoOn(decision) if isinstance(decision, str) else decision)


def test_nobody_goes_on_without_a_world():
    job = Members(3, Elastic())
    assert job.lost({1: "a"}, 0.0) == CannotGoOn("rank 1 was lost before init() returned")


def test_a_rank_for_which_others_wait_to_form_it_is_killed():
    job = members(5)
    job.lost({1: "a"}, 0.0)
    for at_s in range(19):
        job.meets(0, 1, at_s)
        job.meets(2, 1, min(at_s, 3))  # then it is stopped
        job.meets(3, 0, at_s)  # of the world before
    job.reformed(4, 1)
    assert job.expired(19.0) is None
    assert job.expired(20.0) == Kill(frozenset({2, 3}))
    assert job.expired(21.0) is None, "once"
    assert job.suspected(2, [0]) is None
    assert job.lost({2: "b"}, 22.0) == Membership(2, (0, 3, 4), {"1": "a", "2": "b"})
    assert job.due_s == 42.0


def test_where_some_have_left_who_does_not_end_may_be_stopped():
    job = members(3, spares=1)
    job.await_rest(1.0)
    assert job.due_s == math.inf, "all train"
    job.left(0, 2.0)
    job.await_rest(2.0)
    job.ended(0, 3.0)
    job.await_rest(3.0)
    assert job.due_s == 22.0
    assert job.expired(21.0) is None
    assert job.expired(22.0) == Wake(frozenset({1}))
    assert job.due_s == 42.0, "it may be stopped again"
    job.ended(1, 23.0)
    job.await_rest(23.0)
    assert job.due_s == math.inf


def test_what_is_asked_at_every_event_does_not_grow_with_the_ranks():
    job = members(4096, spares=1)
    for rank in range(100):
        job.ended(rank, 0.0)
    for rank in range(100, 4096):
        job.left(rank, 0.0)
    tracemalloc.start()
    job.await_rest(0.0)
    job.ended(4000, 0.0)
    assert tracemalloc.get_traced_memory()[1] < 4096
    tracemalloc.stop()
    assert job.expired(99.0) == Wake(frozenset(range(100, 4096)) - {4000})
