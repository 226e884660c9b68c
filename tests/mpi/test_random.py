"""Random jobs on real ranks, whose threads are plain ones. See tests/storm.py."""

import pytest

import ringreduce as rr
from tests.storm import storm
from tests.tiers import seeds

pytestmark = pytest.mark.mpi
SETS = {1: [], 2: [[1]], 3: [[2, 0], [1, 2]], 4: [[0, 3], [1, 2, 3], [2]]}


@pytest.fixture(params=[0, 3, 1024])
def sets(request, monkeypatch):
    """The members of the process sets of a world whose cache holds few tensors or many; afterwards the usual world."""
    chosen = [sorted(ranks) for ranks in SETS[rr.size()]]
    rr.shutdown()
    monkeypatch.setenv("RINGREDUCE_CACHE_CAPACITY", str(request.param))
    monkeypatch.setenv("RINGREDUCE_FUSION_BUFFER_BYTES", "4096")
    monkeypatch.setenv("RINGREDUCE_FUSION_SLOT_BYTES", "512")
    monkeypatch.setenv("RINGREDUCE_SHARED_SLOT_BYTES", "256")
    monkeypatch.setenv("RINGREDUCE_STALL_ABORT_S", "20")
    rr.init(process_sets=[rr.ProcessSet(ranks) for ranks in chosen])
    yield chosen
    rr.shutdown()
    monkeypatch.undo()
    rr.init()


@pytest.mark.parametrize("seed", seeds([1], explored=5))
def test_a_random_job(sets, seed):
    assert storm(seed, sets) > 50
