import itertools

from ringreduce.collectives.partition import (
    allgather_steps,
    bounds_of,
    chunk_bounds,
    equal_chunk,
    scatter_reduce_steps,
    segments,
)
from tests.support.loops import in_a_loop

SIZES = range(1, 10)


@in_a_loop("size", SIZES)
def test_chunks_cover_everything_and_differ_by_at_most_one_element(size):
    for count in (0, 1, size - 1, size, size + 1, 1000, 100003, (5 << 31) + 3):
        bounds = chunk_bounds(count, size)
        lengths = [high - low for low, high in itertools.pairwise(bounds)]
        assert bounds[0] == 0
        assert bounds[-1] == count
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True), "the longer chunks come first, as in reducescatter"


@in_a_loop("size", SIZES)
@in_a_loop("alignment", [1, 4, 16])
def test_equal_chunks_are_as_short_as_they_can_be(size, alignment):
    for length in (0, 1, alignment, size * alignment - 1, size * alignment, size * alignment + 1, 1000, 100003):
        chunk = equal_chunk(length, size, alignment)
        assert chunk % alignment == 0 < chunk
        assert chunk * size >= length, "together they hold all"
        assert chunk == alignment or (chunk - alignment) * size < length, "and shorter ones would not"


def test_bounds_of_given_lengths():
    assert bounds_of([2, 0, 5]) == [0, 2, 2, 7]


@in_a_loop("size", SIZES)
def test_neighbours_agree_on_what_travels(size):
    for steps in (
        lambda rank, size: scatter_reduce_steps(size, rank + 1),
        lambda rank, size: allgather_steps(size, rank + 1),
    ):
        schedules = [steps(rank, size) for rank in range(size)]
        for step in range(size - 1):
            for rank in range(size):
                right = (rank + 1) % size
                assert schedules[rank][step].send == schedules[right][step].receive


@in_a_loop("size", SIZES)
def test_scatter_reduce_leaves_every_part_once_in_the_chunk_that_a_rank_owns(size):
    parts = [[{rank} for _ in range(size)] for rank in range(size)]  # whose data chunk k of rank r holds
    for step in range(size - 1):
        schedules = [scatter_reduce_steps(size, rank + 1)[step] for rank in range(size)]
        sent = [set(parts[rank][schedules[rank].send]) for rank in range(size)]
        for rank in range(size):
            chunk = parts[rank][schedules[rank].receive]
            assert not chunk & sent[rank - 1], "nothing is added twice"
            chunk |= sent[rank - 1]
    for rank in range(size):
        assert parts[rank][(rank + 1) % size] == set(range(size))


@in_a_loop("size", SIZES)
def test_allgather_sends_only_finished_chunks_and_reaches_all(size):
    finished = [{(rank + 1) % size} for rank in range(size)]
    for step in range(size - 1):
        schedules = [allgather_steps(size, rank + 1)[step] for rank in range(size)]
        for rank in range(size):
            assert schedules[rank].send in finished[rank]
        for rank in range(size):
            finished[rank].add(schedules[rank].receive)
    assert all(chunks == set(range(size)) for chunks in finished)


def test_segments_cover_the_range():
    assert segments(0, 0, 4) == []
    assert segments(3, 10, 4) == [(3, 7), (7, 10)]
    assert segments(3, 11, 4) == [(3, 7), (7, 11)]
