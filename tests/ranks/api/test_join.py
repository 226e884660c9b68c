"""join on threads: uneven data, what a joined rank gives, and what is refused meanwhile."""

import contextvars
import functools
import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support import matrix
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of, known
from tests.support.reference import MATRIX, all_but_few_extended, readable
from tests.support.tiers import parted

NO_CACHE = Settings(cache_capacity=0)


@pytest.mark.parametrize(("dtype", "op"), all_but_few_extended(MATRIX), **readable)
@pytest.mark.parametrize("size", parted([2, 3, 4], lambda size: size == 3))
def test_uneven_steps(size, dtype, op):
    assert run_ranks(size, functools.partial(matrix.join_program, dtype, [op], 33)) == [size - 1] * size


@pytest.mark.parametrize("settings", [None, NO_CACHE], ids=["cache", "no cache"])
def test_the_rank_that_joined_last_is_told_to_all_and_the_next_epoch_begins(settings):
    def program():
        last = []
        for epoch in range(4):
            for _ in range(4 if rr.rank() == epoch % 3 else 1):
                assert rr.allreduce(np.float64(1), name="w", op=rr.Sum) in (1, 3)
            last.append(rr.join())
            assert rr.allgather(np.array([rr.rank()])).tolist() == [0, 1, 2], "all take part again"
        return last

    assert run_ranks(3, program, settings=settings) == [[0, 1, 2, 0]] * 3


@each_rank_of(2)
def test_a_channel_is_not_joined():
    """Its operations are the same ones on all its ranks."""
    channel = rr.ordered()
    with pytest.raises(rr.InputError, match=r"join: ordered\(ranks=\[0, 1\]\) is a channel, .*; join the process set"):
        rr.join(process_set=channel)
    assert channel.allreduce(np.ones(2), op=rr.Sum).tolist() == [2.0] * 2
    assert rr.join() in (0, 1)


def test_an_average_of_the_live_ranks_when_all_that_joined_say_so():
    def program(says_so):
        results = [rr.allreduce(np.float64(10 * rr.rank()), name=f"w{step}") for step in range(rr.rank())]
        rr.join(live_average=says_so[rr.rank()])
        return [float(each) for each in results]

    assert run_ranks(3, lambda: program([True, True, True])) == [[], [15.0], [15.0, 20.0]]
    assert run_ranks(3, lambda: program([True, False, True])) == [[], [15.0], [15.0, 20 / 3]]
    assert run_ranks(3, lambda: program([False, True, True])) == [[], [10.0], [10.0, 20 / 3]]


@pytest.mark.parametrize("settings", [None, NO_CACHE], ids=["known to the cache", "new"])
def test_what_was_given_before_joining_is_settled_when_all_have(settings):
    """Whoever joins first: rank 0's tensor is reduced with what changes nothing."""

    def program(first):
        for _ in range(2):
            rr.allreduce(np.zeros(3), name="w", op=rr.Sum)
        handle = rr.allreduce_async(np.ones(3), name="w", op=rr.Sum) if rr.rank() == 0 else None
        if rr.rank() != first:
            time.sleep(0.05)
        rr.join()
        assert handle is None or rr.poll(handle)
        return None if handle is None else rr.synchronize(handle).tolist()

    for first in (0, 1):
        assert run_ranks(2, lambda first=first: program(first), settings=settings) == [[1, 1, 1], None]


@in_a_loop("known", [False, True])
@in_a_loop("kind", ["allgather", "broadcast", "alltoall", "reducescatter", "barrier", "broadcast_object"])
def test_other_collectives_fail_while_a_rank_has_joined_and_work_again_afterwards(kind, known):
    call = {
        "allgather": lambda: rr.allgather(np.zeros(2), name="w"),
        "broadcast": lambda: rr.broadcast(np.zeros(2), 0, name="w"),
        "alltoall": lambda: rr.alltoall(np.zeros(3), name="w"),
        "reducescatter": lambda: rr.reducescatter(np.zeros(2), name="w"),
        "barrier": rr.barrier,
        "broadcast_object": lambda: rr.broadcast_object(3, 0, name="w"),
    }[kind]

    def program():
        for _ in range(2 * known):
            call()
        if rr.rank() != 1:
            message = rf"^{kind}( 'w')?: rank 1 called join\(\), and a joined rank can take part in allreduce only"
            message += "; call .*; sparse gradients .*: pass sparse_as_dense=True" * (kind == "allgather")
            rr.allreduce(np.zeros(1))  # rank 1 has joined when this is done
            with pytest.raises(rr.CollectiveError, match=message):
                call()
            assert rr.allreduce(np.float64(1), op=rr.Sum) == 2, "allreduce works on"
        last = rr.join()
        call()
        return last

    assert set(run_ranks(3, program)) <= {0, 2}


@each_rank_of(2)
def test_a_scaled_reduction_whose_neutral_element_the_factor_would_change():
    for step in range(2 * rr.rank()):
        assert rr.allreduce(np.float64(3), op=rr.Sum, prescale_factor=2.0, name=f"s{step}") in (6, 12)
        if step:
            with pytest.raises(rr.CollectiveError, match=r"rank 0 called join\(\), and op=Product .*_factor=2\.0 l"):
                rr.allreduce(np.float64(3), op=rr.Product, prescale_factor=2.0)
        assert rr.allreduce(np.int8(5), op=rr.ReduceOp.BITWISE_AND) == 5
    rr.join()


@each_rank_of(3)
def test_a_mismatch_among_those_that_have_not_joined():
    if rr.rank() < 2:
        with pytest.raises(rr.MismatchError, match=r"rank 1 of 3, allreduce 'w' .*: float64\[2\], but rank 0 has"):
            rr.allreduce(np.zeros(1 + rr.rank()), name="w")
        assert rr.allreduce(np.float64(rr.rank()), name="w", op=rr.Max) == 1
    rr.join()
    assert rr.allreduce(np.float64(rr.rank()), name="w", op=rr.Max) == 2


def test_a_rank_that_has_joined_submits_nothing():
    def program():
        if rr.rank() == 0:
            joiner = threading.Thread(target=contextvars.copy_context().run, args=(rr.join,))
            joiner.start()
            while not joined():
                time.sleep(0.001)
            with pytest.raises(
                rr.InputError, match=r"^allreduce 'w' after join\(\): a rank may call nothing else until a"
            ):
                rr.allreduce_async(np.zeros(1), name="w")
            with pytest.raises(ValueError, match=r"^join 'join' after join\(\)"):
                rr.join()
            rr.allreduce_async(np.zeros(1), name="in a set", process_set=known([0], 1)).wait()
            released.set()
            joiner.join()
        else:
            released.wait(5)
            rr.join()
        return rr.allreduce(np.float64(1), op=rr.Sum)

    def joined():
        return "join.join" in runtime.current("test").engine.states[0].pending

    released = threading.Event()
    assert run_ranks(2, program, process_sets=[[0]]) == [2, 2]
