"""The pool of real ranks itself: results by rank, exceptions that name theirs, and what follows a death and a hang."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from tests.support.pool import PoolEndedError, RankError
from tests.support.world import on_a_pool

pytestmark = on_a_pool


def runs(pid):
    """There is such a process, and nobody only forgot to wait for it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def test_results_come_by_rank_from_processes_that_stay(world):
    def program():
        return rr.rank(), rr.size(), rr.allreduce(np.float64(10 * rr.rank()), op=rr.Sum), os.getpid()

    first, second = world(2).run(program), world(2).run(program)
    assert [each[:3] for each in first] == [(0, 2, 10.0), (1, 2, 10.0)]
    assert first == second, "the same processes"
    assert os.getpid() not in {each[3] for each in first}


def test_settings_and_process_sets_are_those_of_one_function(world):
    def program():
        changed = [name for name in ("RINGREDUCE_CACHE_CAPACITY", "RINGREDUCE_DETERMINISTIC") if name in os.environ]
        return changed, rr.is_initialized(), len(rr.get_process_set_ids_and_ranks())

    settings = Settings(cache_capacity=3, deterministic=True)
    both = ["RINGREDUCE_CACHE_CAPACITY", "RINGREDUCE_DETERMINISTIC"]
    assert world(2).run(program, settings=settings, process_sets=[[1]]) == [(both, True, 2)] * 2
    assert world(2).run(program) == [([], True, 1)] * 2


def test_an_exception_is_raised_again_and_its_cause_names_the_rank(world):
    def program():
        if rr.rank() == 1:
            raise KeyError("of rank one")
        rr.barrier()

    before = world(2)
    with pytest.raises(KeyError, match="of rank one") as raised:
        before.run(program)
    assert isinstance(raised.value.__cause__, RankError)
    assert str(raised.value.__cause__).startswith("on rank 1:\nTraceback")
    assert world(2) is before, "the pool goes on"
    assert before.run(rr.rank) == [0, 1]


def test_an_exception_that_does_not_travel_is_told_by_its_traceback(world):
    class Stubborn(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    def program():
        raise Stubborn("this", "that")

    with pytest.raises(RankError, match=r"(?s)on rank [01]:.*Stubborn: this and that"):
        world(2).run(program)


def test_a_warning_is_an_error_as_in_all_tests(world):
    def program():
        import warnings

        warnings.warn("look out", UserWarning, stacklevel=1)

    with pytest.raises(UserWarning, match="look out"):
        world(2).run(program)


def test_a_death_ends_the_pool_and_the_next_is_a_new_one(world):
    def program():
        if rr.rank() == 1:
            os._exit(3)
        rr.barrier()

    before = world(2)
    with pytest.raises(PoolEndedError, match=r"(?s)2 ranks has ended: a rank died\n.*rank 1 of 2 failed first"):
        before.run(program)
    assert world(2) is not before
    assert world(2).run(rr.rank) == [0, 1]


def test_a_hang_ends_the_pool_and_tells_what_failed_before_and_the_ranks_stacks(world):
    def stuck_in_here():
        if rr.rank() == 0:
            raise LookupError("the reason")
        time.sleep(600)

    before = world(2)
    pids = before.run(os.getpid)
    message = r"(?s)took longer than 0\.2 s\n.*on rank 0:\n.*LookupError: the reason.*rank 1 of 2.*in stuck_in_here"
    with pytest.raises(PoolEndedError, match=message):
        before.run(stuck_in_here, timeout_s=0.2)
    assert not any(map(runs, pids))
    assert world(2).run(rr.rank) == [0, 1]
