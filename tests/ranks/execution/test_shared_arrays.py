"""Arrays that all members of a channel map, and reduce in place; what hinders that, hinders it for all alike."""

import mmap
import os
import tempfile
import threading
import weakref

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.arrays.view import as_buffer
from ringreduce.execution import shared_arrays
from ringreduce.execution.shared_arrays import REFUSED, WISHED
from ringreduce.testing import run_ranks
from tests.ranks.execution.test_into_outputs import SUM, begin, open_channel
from tests.support.on_threads import each_rank_of

COUNT = 200_003


class Moved:
    """An array that can move into a file that is memory."""

    def __init__(self, array, error=None):
        self.array, self.number, self._error = array, WISHED, error
        self.nbytes = array.nbytes

    def move(self):
        if self._error is not None:
            raise self._error
        descriptor = os.memfd_create("array")
        weakref.finalize(self, os.close, descriptor)
        os.truncate(descriptor, self.array.nbytes)
        shared = np.frombuffer(mmap.mmap(descriptor, self.array.nbytes), self.array.dtype)
        shared[...] = self.array
        self.array = shared
        return descriptor, as_buffer(shared, writable=True)


def reduce(channel, memory, op="Sum"):
    begin(channel, "allreduce", [memory.array], [memory.array], (("op", op), *SUM[1:]), payload=memory).wait()
    return memory.array


def mine(rank, salt=0):
    return np.random.default_rng(10 * rank + salt).standard_normal(COUNT).astype(np.float32)


def program(refuses=lambda rank: None):
    channel, memory, plain = open_channel(), Moved(mine(rr.rank()), refuses(rr.rank())), Moved(mine(rr.rank()))
    plain.number = 0
    found = [(reduce(channel, memory).copy(), reduce(channel, plain).copy(), memory.number)]
    for salt, op in enumerate(("Average", "Max", "Sum"), 1):
        memory.array[:], plain.array[:] = mine(rr.rank(), salt), mine(rr.rank(), salt)
        found.append((reduce(channel, memory, op).copy(), reduce(channel, plain, op).copy(), memory.number))
    return found


def check(results, is_shared):
    """The bits are those of the other way, and the same on all ranks."""
    for found in results:
        for (in_place, packed, number), (first, _, first_number) in zip(found, results[0], strict=True):
            np.testing.assert_array_equal(in_place, packed)
            np.testing.assert_array_equal(in_place, first)
            assert (number > WISHED) is is_shared
            assert number == first_number


@pytest.mark.parametrize("size", [2, 3])
def test_they_are_reduced_in_place(size):
    check(run_ranks(size, program), is_shared=True)


def test_a_rank_without_room_keeps_all_from_it():
    results = run_ranks(3, lambda: program(lambda rank: OSError("no room") if rank == 1 else None))
    check(results, is_shared=False)
    assert results[0][0][2] == REFUSED


@pytest.mark.parametrize("late", [0, 1])
def test_an_array_stays_where_it_is_while_another_operation_is_to_use_it(late):
    """One rank has submitted that already, and the other not yet."""
    submitted = threading.Event()

    def twice():
        channel, memory = open_channel(), Moved(mine(rr.rank()))
        if rr.rank() == late:  # until it begins the first, that moves nowhere
            assert submitted.wait(30)
        handles = [begin(channel, "allreduce", [memory.array], [memory.array], SUM, payload=memory)]
        if rr.rank() == late:
            handles.pop().wait()
        part = memory.array[1000:2000]
        handles.append(begin(channel, "allreduce", [part], [part], SUM))
        submitted.set()
        for each in handles:
            each.wait()
        before = memory.array.copy(), memory.number
        return *before, reduce(channel, memory).copy(), memory.number

    total = mine(0) + mine(1)
    twice_in_part = total.copy()
    twice_in_part[1000:2000] *= 2
    for array, number, again, then in run_ranks(2, twice):
        np.testing.assert_array_equal(array, twice_in_part)
        np.testing.assert_array_equal(again, 2 * twice_in_part)
        assert number <= WISHED < then


def test_another_process_of_that_number_is_not_taken_for_a_member(monkeypatch):
    """As where ranks are in containers, each with numbers of its own."""
    with tempfile.TemporaryFile() as other:
        path = f"/proc/{os.getpid()}/fd/{other.fileno()}"
        real = shared_arrays.mapped
        monkeypatch.setattr(shared_arrays, "mapped", lambda place, nbytes: real(place._replace(path=path), nbytes))
        check(run_ranks(2, program), is_shared=False)


def test_ranks_with_other_arrays_pack_them():
    """One has made its array anew, so it is none that the others have mapped."""

    def anew():
        channel, memory = open_channel(), Moved(mine(rr.rank()))
        reduce(channel, memory)
        if rr.rank() == 1:
            memory = Moved(mine(1))
        memory.array[:] = mine(rr.rank())
        return reduce(channel, memory)

    for found in run_ranks(2, anew):
        np.testing.assert_array_equal(found, mine(0) + mine(1))


@each_rank_of(2)
def test_arrays_that_a_rank_has_no_more_are_unmapped():
    """As DDP's buckets, which it makes anew, and those of a model that is gone."""
    channel = open_channel()
    for _ in range(5):
        memory = Moved(mine(rr.rank()))
        reduce(channel, memory)
        assert memory.number > WISHED
    assert len(runtime.current("a test").engine.channels.by_number[channel]._shared._others) == 1
