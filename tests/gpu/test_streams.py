"""Which stream waits for which: results are right however late arrays are, and the host waits for no GPU."""

import contextlib

import numpy as np
import pytest

import ringreduce as rr
from tests.gpu.libraries import same_bits
from tests.support.reference import data

pytestmark = pytest.mark.mpi
COUNT = 40_003
LATE_MS, VERY_LATE_MS = 50, 3000


def mine(seed=0, count=COUNT):
    return data("float32", count, rr.rank(), seed)


CALLS = {
    "allreduce": lambda array: rr.allreduce_async(array, op=rr.Sum, name="late"),
    "allreduce in place": lambda array: rr.allreduce_async_(array, op=rr.Sum, name="late"),
    "group": lambda array: rr.grouped_allreduce_async([array, array[: COUNT // 3]], op=rr.Average, name="late"),
    "broadcast": lambda array: rr.broadcast_async(array, rr.size() - 1, name="late"),
    "broadcast in place": lambda array: rr.broadcast_async_(array, rr.size() - 1, name="late"),
    "allgather": lambda array: rr.allgather_async(array[: COUNT - rr.rank()], name="late"),
    "alltoall": lambda array: rr.alltoall_async(array[: COUNT - COUNT % rr.size()], name="late"),
    "reducescatter": lambda array: rr.reducescatter_async(array, op=rr.Sum, name="late"),
}


def compare(library, found, expected):
    if not isinstance(found, list):
        found, expected = [found], [expected]
    for one, other in zip(found, expected, strict=True):
        same_bits(library.get(one), np.asarray(other))


@pytest.mark.parametrize("kind", CALLS)
def test_an_array_that_becomes_right_only_after_it_was_submitted(path, library, kind):
    for seed in range(3):
        with library.on(library.stream()):
            handle = CALLS[kind](library.put(mine(seed), LATE_MS))
            found = rr.synchronize(handle)
            compare(library, found, rr.synchronize(CALLS[kind](mine(seed))))


@pytest.mark.parametrize("of_this_thread", [False, True])
def test_an_array_of_the_default_stream(path, library, of_this_thread):
    """Again and again: the first one also makes slots, for which the host waits for that stream."""
    if of_this_thread and library.name != "cupy":
        pytest.skip("torch has no default stream of a thread")
    with library.module.cuda.Stream.ptds if of_this_thread else contextlib.nullcontext():
        for seed in range(3):
            handle = rr.allreduce_async(library.put(mine(seed), LATE_MS), op=rr.Sum, name="default")
            compare(library, rr.synchronize(handle), rr.allreduce(mine(seed), op=rr.Sum, name="host"))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_result_on_another_stream_than_the_arrays(path, library, in_place):
    """The one that is current in synchronize() waits; further ones wait for that, as with any other work."""
    begin = rr.allreduce_async_ if in_place else rr.allreduce_async
    expected = rr.allreduce(mine(), op=rr.Sum, name="host")
    producer, consumer, another = (library.stream() for _ in range(3))
    for _ in range(3):
        with library.on(producer):
            handle = begin(library.put(mine(), LATE_MS), op=rr.Sum, name="moved")
        with library.on(consumer):
            result = rr.synchronize(handle)
            event = library.event()
        with library.on(another):
            library.wait(event)
            compare(library, result, expected)


def test_the_memory_of_an_array_that_was_let_go_is_not_used_again_too_soon(path, library):
    """The pools of CuPy and torch hand it out at once, on the stream where the array was; the results are elsewhere.

    The engine's stream lags behind, since it waits for a rank that is late.
    """
    expected = [rr.allreduce(mine(seed), op=rr.Sum, name="host") for seed in range(8)]
    producer, consumer = library.stream(), library.stream()
    for late in range(3):
        found = []
        for seed in range(8):
            with library.on(producer):
                is_late = seed == 0 and rr.rank() == late % rr.size()
                handle = rr.allreduce_async(library.put(mine(seed), LATE_MS * is_late), op=rr.Sum, name="let go")
            with library.on(consumer):
                found.append(rr.synchronize(handle))
            del handle
            with library.on(producer):
                library.put(mine(99))
        with library.on(consumer):
            for each, other in zip(found, expected, strict=True):
                compare(library, each, other)


def test_the_memory_of_a_result_that_was_let_go_is_not_written_again(path, library):
    """Results that nobody wants, in memory that is somebody else's by the time they would be there."""
    with library.on(library.stream()):
        for _ in range(5):
            rr.synchronize(rr.allreduce_async(library.put(mine(1), LATE_MS), op=rr.Sum, name="unwanted"))
            same_bits(library.get(library.put(mine(2))), mine(2))


@contextlib.contextmanager
def held_up(library):
    """A stream on which nothing goes on for seconds; and, in the end, when it goes on again."""
    with library.on(library.stream()):
        library.hold(VERY_LATE_MS)
        yield library.event()


def test_the_host_does_not_wait_for_the_gpu(path, library):
    """synchronize() returns while what the arrays depend on is not done. No clock is read: an event is not done."""
    if not path.startswith("ipc"):
        pytest.skip("copies through the host must wait for the GPU, in the engine's thread")
    submitted = library.put(mine())
    library.get(submitted)
    with library.on(library.stream()):  # memory, kernels and the agreement are there after this
        for _ in range(3):
            rr.synchronize(rr.allreduce_async_(submitted, op=rr.Average, name="held up"))
        library.get(submitted)
    rr.barrier()
    with held_up(library) as event:
        handle = rr.allreduce_async_(submitted, op=rr.Average, name="held up")
        result = rr.synchronize(handle)
        assert not library.is_done(event), "the host waited for the stream that was held up"
        assert rr.poll(handle)
        library.get(result)
        assert library.is_done(event)


def test_many_slots_of_late_ranks(path, library):
    """So many that every slot is used again and again, while one rank or another lags behind."""
    count = 600_001
    handles = []
    streams = [library.stream() for _ in range(4)]
    for number in range(12):
        with library.on(streams[number % 4]):
            array = library.put(mine(number, count), 5 if number % rr.size() == rr.rank() else 0)
            handles.append(rr.allreduce_async(array, op=rr.Sum, name=f"slots {number}"))
    for number, handle in enumerate(handles):
        compare(library, rr.synchronize(handle), rr.allreduce(mine(number, count), op=rr.Sum, name="host"))
