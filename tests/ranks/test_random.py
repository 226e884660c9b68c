"""Random jobs on threads: right results, no deadlock, whatever the order. See tests/storm.py."""

import pytest

from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.storm import storm
from tests.tiers import seeds

SETS = {1: [], 2: [[1]], 3: [[2, 0], [1, 2]], 4: [[0, 3], [1, 2, 3], [2]]}


@pytest.mark.parametrize("seed", seeds(range(6), explored=60))
def test_a_random_job(seed):
    size = 2 + seed % 3
    settings = Settings(
        fusion_buffer_bytes=4096,
        shared_slot_bytes=256,
        fusion_slot_bytes=512,
        ring_segment_bytes=200,
        cache_capacity=[0, 3, 20, 1024][seed % 4],
        cycle_time_ms=[0.0, 0.5][seed % 2],
    )
    sets = [sorted(ranks) for ranks in SETS[size]]
    waited = run_ranks(
        size, lambda: storm(seed, sets), settings=settings, process_sets=sets, buffered=seed % 5 == 0, timeout_s=15
    )
    assert min(waited) > 100
