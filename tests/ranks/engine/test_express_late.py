"""Short known operations in the caller's thread: ranks that are late, join, leave, are lost or are interrupted."""

import re
import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.engine import express
from ringreduce.engine.express import DONE, LATE, OTHER, SUMS_LATE
from ringreduce.kernels import native
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.counters import END, READ
from tests.support.express import WARM, Counting, element, fast, known, own, run, state, values, warm, watched, within
from tests.support.patience import wait_until

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(native.module is None, reason=f"the compiled module: {native.MISSING}"),
]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("count", "slot_bytes"), [(64, 1 << 20), (20_000, 1 << 20), (20_000, 1 << 13)])
def test_a_broadcast_and_a_large_sum_whose_others_are_late_go_on(late, count, slot_bytes, monkeypatch):
    """Scheduled and packed, with no patience left: the rest is an operation under way. In pieces: all of it is."""

    def program():
        counts = [0] * 4
        for number in range(3 * WARM):
            for name in "sb":
                watched(name, counts)
            array = values(rr.rank(), number, count)
            summed = rr.allreduce_(array.copy(), name="s", op=rr.Sum)
            np.testing.assert_array_equal(summed, values(0, number, count) + values(1, number, count))
            np.testing.assert_array_equal(rr.broadcast_(array, 1, "b"), values(1, number, count))
            if number == WARM:
                monkeypatch.setattr(express, "PATIENCE_US", 0.0)
            time.sleep(0.001 * (rr.rank() == late))
        return counts[LATE] + counts[SUMS_LATE]

    assert run_ranks(2, program, settings=Settings(shared_slot_bytes=slot_bytes))[1 - late] > 0


@pytest.mark.parametrize("found", [OTHER, LATE])
def test_a_response_forgets_the_id_by_which_it_was_counted(found):
    """Rank 0's call differs; the response comes while rank 1 waits for the schedule, or when it has handed over."""
    begun, counts = threading.Event(), [0] * 4

    def how(run, *arguments):
        if found == LATE:
            ends = within(run, 0.0, *arguments)
            begun.set()
            return ends
        begun.set()
        views = state().negotiator._views
        wait_until(lambda: views[0].words[END] != views[1].words[READ])
        return run(*arguments)

    def program():
        warm()
        rr.barrier()
        if rr.rank() == 1:
            watched("a", counts, how)
            with pytest.raises(rr.MismatchError, match="allreduce 'a'") as caught:
                fast("a", np.ones(64, np.float32))
        else:
            assert begun.wait(20)
            with pytest.raises(rr.MismatchError) as caught:
                rr.allreduce_(np.ones(65, np.float32), name="a", op=rr.Sum)
        text = r"rank 1 of 2, allreduce 'a' \(\w*express\w*\.py:\d+\): float32\[64\]"
        assert re.match(text, str(caught.value)), "the caller's line"
        warm()
        return rr.allreduce_(np.ones(64, np.float32), name="a", op=rr.Sum)[0]

    assert run_ranks(2, program) == [2.0, 2.0]
    assert counts[found] >= 1


@pytest.mark.parametrize("late", [0, 1])
def test_others_have_counted_but_not_packed(late):
    """The sum goes on as an operation under way, behind which others come in their order."""
    packed, counts = threading.Event(), [0] * 4

    def until_counted(run, *arguments):
        negotiator = state().negotiator
        if late == 1:
            wait_until(lambda: negotiator._views[1].counters[arguments[2]] != negotiator._leader.passed[arguments[2]])
        found = within(run, 1e5, *arguments)
        packed.set()
        return found

    def program():
        array, other = (element(rr.rank(), name, 1) for name in "ab")
        warm()
        rr.barrier()
        if rr.rank() == late:
            executor = state().executor
            run = executor.run
            executor.run = lambda *given: (packed.wait(20), run(*given))
            rr.allreduce_async_(array, name="a", op=rr.Sum).wait()
        else:
            watched("a", counts, until_counted)
            fast("a", array)
        return array, rr.allreduce_(other, name="b", op=rr.Sum)

    for array, other in run_ranks(2, program):
        np.testing.assert_array_equal(array, element(0, "a", 1) + element(1, "a", 1))
        np.testing.assert_array_equal(other, element(0, "b", 1) + element(1, "b", 1))
    assert counts == [0, 0, 0, 1]


def test_what_was_handed_over_is_counted_once():
    """Each rank calls another name first: neither is scheduled before both have called both."""
    both_late = threading.Barrier(2)

    def program():
        warm()
        names = "ab" if rr.rank() else "ba"
        for number in range(10):
            first, second = (element(rr.rank(), name, number) for name in names)
            handles, counts = [], [0] * 4

            def how(run, *arguments, handles=handles, second=second):
                found = within(run, 0.0, *arguments)
                both_late.wait(20)
                handles.append(rr.allreduce_async_(second, name=names[1], op=rr.Sum))
                return found

            program = known()[names[0]]
            program.run = Counting(program.run, counts, how)
            fast(names[0], first)
            handles[0].wait()
            assert counts == [0, 0, 1, 0]
            for name, each in zip(names, (first, second), strict=True):
                np.testing.assert_array_equal(each, sum(element(rank, name, number) for rank in (0, 1)))
        return state().negotiator._views[rr.rank()].counters[:2].tolist()

    counted, others = run_ranks(2, program)
    assert counted == others


@pytest.mark.parametrize("first", [0, 1])
def test_it_overtakes_nothing_that_is_pending(first):
    """Else two operations of this rank could be ready at once, and be one entry of the schedule."""
    called = threading.Event()

    def program():
        arrays = [element(rr.rank(), name, 1) for name in "ab"]
        warm()
        rr.barrier()
        time.sleep(0.05)
        if rr.rank() == first:
            handle = rr.allreduce_async_(arrays[1], name="b", op=rr.Sum)
            handle.poll()  # so it is announced
            wait_until(lambda: not own()._inbox.holds_any())
            time.sleep(0.05)
            assert run("a", arrays[0]) is None
            called.set()
        else:
            assert called.wait(20)
            handle = rr.allreduce_async_(arrays[1], name="b", op=rr.Sum)
        handle.wait()
        fast("a", arrays[0])
        return arrays

    expected = [element(0, name, 1) + element(1, name, 1) for name in "ab"]
    for arrays in run_ranks(2, program):
        np.testing.assert_array_equal(arrays, expected)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_named(late):
    """A call that was handed over is pending as any other: its stall is reported, with the caller's line."""

    given_up = threading.Event()

    def program():
        warm()
        rr.barrier()
        if rr.rank() == late:
            assert given_up.wait(20)
            return
        with pytest.raises(rr.StalledError, match=rf"(?s)allreduce 'a'.*\w*express\w*\.py:\d+.*rank {late}"):
            rr.allreduce_(element(0, "a", 0), name="a", op=rr.Sum)
        given_up.set()

    run_ranks(2, program, settings=Settings(stall_check_s=0.2, stall_abort_s=0.4))


def test_a_stall_report_names_what_went_this_way_last(capsys):
    given_up = threading.Event()

    def program():
        warm()
        rr.allreduce_(element(rr.rank(), "c", 0), name="not the last")
        fast("b", element(rr.rank(), "b", 0))
        if rr.rank() == 1:
            assert given_up.wait(20)
            return
        with pytest.raises(rr.StalledError):
            rr.allreduce_(element(0, "a", 0), name="a", op=rr.Sum)
        given_up.set()

    run_ranks(2, program, settings=Settings(stall_check_s=0.2, stall_abort_s=0.4))
    told = capsys.readouterr().err
    assert re.search(r"rank 1 last submitted allreduce 'b' \(\w*express\w*\.py:\d+\)", told), told


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_joins(size):
    def program():
        warm()
        total = 0.0
        for _ in range(20 + 10 * rr.rank()):
            total += float(rr.allreduce_(np.ones(64, np.float32), name="a", op=rr.Sum)[0])
        last = rr.join()
        again = [float(rr.allreduce_(np.ones(64, np.float32), name="a", op=rr.Sum)[0]) for _ in range(2 * WARM)]
        assert again == [size] * (2 * WARM)
        return total, last

    totals = [20.0 * size + sum(size - 1 - step // 10 for step in range(10 * rank)) for rank in range(size)]
    assert run_ranks(size, program) == [(each, size - 1) for each in totals]


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_rank_leaves(leaver):
    def program():
        warm()
        rr.barrier()
        if rr.rank() == leaver:
            return
        with pytest.raises(rr.PeerLostError, match=rf"allreduce 'a' .*: rank {leaver} has left the job"):
            rr.allreduce_(element(0, "a", 0), name="a", op=rr.Sum)

    run_ranks(3, program)


@pytest.mark.parametrize("found", [DONE, LATE, SUMS_LATE])
def test_an_interruption_ends_the_engine_and_the_others_hear_of_it(found):
    """As one in the middle of a poll does."""

    def call():
        while True:  # until rank 0 has found what it looks for
            rr.allreduce_(element(0, "a", 0), name="a", op=rr.Sum)

    class Interrupted(Counting):
        def __call__(self, *arguments):
            if found == SUMS_LATE:  # it is then scheduled at once, but the other has not packed yet
                negotiator, until_s = state().negotiator, time.monotonic() + 0.01
                while negotiator._views[1].counters[arguments[2]] == negotiator._leader.passed[arguments[2]]:
                    if time.monotonic() > until_s:
                        break
            ends = within(self.original, 1e3 if found == DONE else 0.0, *arguments)
            if ends == found:
                raise KeyboardInterrupt
            return ends

    def program():
        warm("a")
        if rr.rank() == 0:
            program = known()["a"]
            program.run = Interrupted(program.run, [0] * 4)
            with pytest.raises(KeyboardInterrupt):
                call()
            with pytest.raises(rr.CollectiveError, match="rank 0 of 2 failed inside an operation: KeyboardInterrupt"):
                call()
        else:
            with pytest.raises(rr.CollectiveError, match="rank 0 of 2 failed inside an operation"):
                call()

    run_ranks(2, program)
