"""Random jobs on threads and on real ranks: right results, no deadlock, in any order. See support/random_job.py."""

import pytest

from ringreduce.settings import Settings
from tests.support.random_job import storm
from tests.support.tiers import seeds
from tests.support.world import on_every_world

SETS = {1: [], 2: [[1]], 3: [[2, 0], [1, 2]], 4: [[0, 3], [1, 2, 3], [2]]}


def waited(world, size, seed, cache_capacity, cycle_time_ms, epochs=2, **options):
    """How many tensors each rank of a random job has waited for."""
    settings = Settings(
        fusion_buffer_bytes=4096,
        shared_slot_bytes=256,
        fusion_slot_bytes=512,
        ring_segment_bytes=200,
        cache_capacity=cache_capacity,
        cycle_time_ms=cycle_time_ms,
    )
    sets = [sorted(ranks) for ranks in SETS[size]]
    run = world(size).run
    return run(lambda: storm(seed, sets, epochs), settings=settings, process_sets=sets, **options)


@pytest.mark.parametrize("seed", seeds(range(4), explored=60))
def test_a_random_job(world, seed):
    cache_capacity, cycle_time_ms = [0, 3, 20, 1024][seed % 4], [0.0, 0.5][seed % 2]
    assert min(waited(world, 2 + seed % 3, seed, cache_capacity, cycle_time_ms, buffered=seed % 5 == 0)) > 100


@on_every_world
@pytest.mark.parametrize("cache_capacity", [0, 3, 1024])
@pytest.mark.parametrize("seed", seeds([1], explored=5))
def test_a_random_job_whose_ranks_are_threads_or_processes(world, size, seed, cache_capacity):
    assert min(waited(world, size, seed, cache_capacity, Settings().cycle_time_ms, epochs=1)) > 50
