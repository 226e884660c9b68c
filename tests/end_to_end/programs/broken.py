"""Tests for ranks of which one fails, and one hangs."""

import time

import pytest

import ringreduce as rr

pytestmark = pytest.mark.mpi


def test_one_rank_fails():
    assert rr.rank() != 1, "the one that failed"
    rr.barrier()


@pytest.mark.timeout(3)
def test_all_ranks_hang():
    while True:
        rr.barrier() if rr.rank() else time.sleep(1)
