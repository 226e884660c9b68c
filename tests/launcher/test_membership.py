"""Who is in the world of an elastic job: events in, decisions out, without processes."""

import math
import tracemalloc

import pytest

from ringrun.connection.wire import Membership
from ringrun.elastic import Elastic
from ringrun.job.membership import CannotGoOn, Kill, Members, Wake

LIMIT_S = 20.0


def members(size: int = 4, **options: int) -> Members:
    made = Members(size, Elastic(stalled_s=LIMIT_S, **options))
    made.initialized()
    return made


def reform(of: Members) -> None:
    """Let all members say that the last list works."""
    assert [of.reformed(rank, of.number) for rank in of.ranks] == [False] * (len(of.ranks) - 1) + [True]


def test_others_go_on_without_a_rank_that_is_lost() -> None:
    job = members()
    assert job.lost({2: "was killed by SIGKILL"}, 5.0) == Membership(1, (0, 1, 3), {"2": "was killed by SIGKILL"})
    assert job.lost({2: "ended"}, 6.0) is None, "its agent says it twice"
    assert (job.overcome, job.due_s) == (set(), 25.0)
    reform(job)
    assert (job.overcome, job.due_s) == ({2}, math.inf)


def test_rank_0_is_a_rank_like_others() -> None:
    job = members(3)
    assert job.lost({0: "ended with exit code 7"}, 0.0) == Membership(1, (1, 2), {"0": "ended with exit code 7"})


def test_a_loss_while_ranks_form_a_world_begins_it_again() -> None:
    job = members()
    job.lost({1: "a"}, 0.0)
    assert not job.reformed(0, 1)
    assert job.lost({3: "b"}, 4.0) == Membership(2, (0, 2), {"1": "a", "3": "b"})
    assert not job.reformed(2, 1), "of the list before"
    assert job.expired(23.0) is None
    assert not job.reformed(0, 2)
    assert job.reformed(2, 2)
    assert job.overcome == {1, 3}


def test_those_that_do_not_form_it_in_time_are_named() -> None:
    job = members()
    job.lost({1: "a"}, 1.0)
    assert job.expired(21.0) is None, "none waits for others: all may compute"
    job.reformed(0, 1)
    late = job.expired(41.0)
    assert late == CannotGoOn("ranks 2-3 did not go on within 40 s after the loss of rank 1")
    assert job.overcome == set(), "the job fails by rank 1 after all"


def test_a_rank_for_which_others_wait_to_form_it_is_killed() -> None:
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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"min_np": 3}, "2 ranks left, and --min-np is 3"),
        ({"max_failures": 1}, "--max-failures 1: 2 ranks failed"),
    ],
)
def test_the_job_ends_where_the_user_says_so(options: dict[str, int], why: str) -> None:
    job = members(**options)
    assert isinstance(job.lost({1: "a"}, 0.0), Membership)
    reform(job)
    assert job.lost({2: "b"}, 0.0) == CannotGoOn(why)
    assert job.overcome == {1}, "the second one is why"


def test_nobody_goes_on_without_a_world() -> None:
    job = Members(3, Elastic())
    assert job.lost({1: "a"}, 0.0) == CannotGoOn("rank 1 was lost before init() returned")


def test_with_no_rank_left_it_is_over() -> None:
    job = members(2)
    job.lost({0: "a"}, 0.0)
    assert job.lost({1: "b"}, 0.0) == CannotGoOn("0 ranks left, and --min-np is 1")
    assert job.overcome == set()


def test_spares_take_the_places_of_the_lost_until_none_is_left() -> None:
    job = members(5, spares=2)
    assert (job.ranks, job.spares) == ((0, 1, 2), [3, 4])
    assert job.lost({3: "a"}, 0.0) is None, "the world does not need it"
    assert job.lost({0: "b"}, 0.0) == Membership(1, (1, 2, 4), {"0": "b", "3": "a"})
    assert job.spares == []
    reform(job)
    assert job.lost({4: "c"}, 0.0) == Membership(2, (1, 2), {"0": "b", "3": "a", "4": "c"})


def test_spares_have_no_work_once_a_rank_has_left() -> None:
    job = members(4, spares=1)
    job.left(0, 0.0)
    assert job.lost({1: "a"}, 0.0) == Membership(1, (2,), {"1": "a"})
    assert job.spares == [3]


def test_spares_alone_have_no_state_to_go_on_with() -> None:
    job = members(3, spares=1)
    assert job.lost({0: "a"}, 0.0) == Membership(1, (1, 2), {"0": "a"})
    found = job.lost({1: "b"}, 0.0)
    assert isinstance(found, CannotGoOn)
    assert found.why == "only spares are left, rank 2, which have no state to go on with"


def test_ranks_that_leave_in_order_are_missed_by_nobody() -> None:
    job = members(3)
    for rank in range(3):
        job.left(rank, 0.0)
    for rank in (0, 1):
        assert job.ended(rank, 0.0) is None
    assert job.lost({2: "a"}, 0.0) is None, "nobody is left to tell it, and the work is done"
    assert job.overcome == {2}


def test_ranks_that_wait_in_shutdown_hear_of_a_loss() -> None:
    job = members(3)
    job.left(0, 0.0)
    job.left(2, 0.0)
    assert job.lost({1: "a"}, 0.0) == Membership(1, (), {"1": "a"})
    assert (job.ranks, job.overcome, job.due_s) == ((0, 2), {1}, math.inf)
    assert job.ended(0, 0.0) is None


def test_where_some_have_left_who_does_not_end_may_be_stopped() -> None:
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


def test_a_rank_that_leaves_and_ends_before_others_leave_is_missed() -> None:
    job = members(3)
    job.left(0, 0.0)
    assert job.ended(0, 0.0) == Membership(1, (1, 2), {"0": "ended with exit code 0"})
    assert job.due_s == math.inf, "they may have work that takes long, and need no world"


def test_leaving_ends_the_wait_for_a_rank() -> None:
    job = members(3)
    job.lost({1: "a"}, 0.0)
    assert job.left(0, 0.0) == Membership(2, (2,), {"1": "a"}), "rank 2 may wait for it already"
    assert job.left(2, 0.0) is None
    assert job.due_s == math.inf


def test_a_rank_that_just_ends_with_0_is_missed_where_enough_are_left() -> None:
    job = members(3, min_np=2)
    assert job.ended(1, 0.0) == Membership(1, (0, 2), {"1": "ended with exit code 0"})
    reform(job)
    assert job.ended(2, 0.0) is None, "it may be the end of all"
    assert job.suspected(0, [2]) == CannotGoOn("rank 0 waits for rank 2, which ended with exit code 0")


def test_a_rank_for_which_others_wait_after_one_just_ended_is_killed() -> None:
    job = members(4)
    job.ended(1, 1.0)
    assert job.due_s == math.inf, "all may have work of their own"
    for at_s in range(5, 26):
        job.meets(2, 1, at_s)
    job.reformed(3, 1)
    assert job.due_s == 25.0
    assert job.expired(25.0) == Kill(frozenset({0}))
    assert job.expired(45.0) == CannotGoOn("ranks 0,2 did not go on within 40 s after the loss of rank 1")


def test_all_may_just_end() -> None:
    job = members(2)
    assert isinstance(job.ended(0, 0.0), Membership)
    assert job.ended(1, 0.0) is None
    assert job.expired(100.0) is None, "the last one need not form a world"


def test_suspects_are_killed_once_and_what_they_say_does_not_count() -> None:
    job = members()
    job.lost({3: "a"}, 0.0)
    assert job.suspected(0, [2, 3]) == Kill(frozenset({2}))
    assert job.suspected(1, [2]) is None
    assert job.suspected(2, [0, 1]) is None
    assert job.suspected(3, [1]) is None, "it is dead"
    assert job.suspected(0, [0]) == Kill(frozenset({0})), "a coordinator says that its own script waits"
    assert job.lost({2: "b"}, 0.0) == Membership(2, (0, 1), {"2": "b", "3": "a"})


def test_a_rank_that_blames_others_is_lost_alone_where_these_live_or_are_done_with() -> None:
    job = members()
    job.lost({2: "a"}, 0.0)
    reform(job)
    job.lost({0: "b"}, 0.0)
    assert job.blamed(0) is None


def test_what_is_asked_at_every_event_does_not_grow_with_the_ranks() -> None:
    job = members(4096, spares=1)
    for rank in range(100):
        job.ended(rank, 0.0)
    tracemalloc.start()
    job.await_rest(0.0)
    assert tracemalloc.get_traced_memory()[1] < 4096
    tracemalloc.stop()
    assert job.expired(99.0) == Wake(frozenset(range(100, 4096)))
