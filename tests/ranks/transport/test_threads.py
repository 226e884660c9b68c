"""The transport of ranks that are threads is stricter than MPI: what a wrong algorithm is told."""

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import bruck, ring
from ringreduce.collectives.ops import Reduction, Sum
from ringreduce.errors import CollectiveError, PeerLostError
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support.on_threads import transport


def test_memory_that_is_being_sent_is_not_received_into():
    def program():
        flat = np.zeros(4)
        transport().send(flat[:3], 1 - transport().rank, 7)
        transport().receive(flat[2:], 1 - transport().rank, 8)

    with pytest.raises(CollectiveError, match=r"rank \d receives into memory that it is still sending to rank \d"):
        run_ranks(2, program)


def test_different_lengths_are_told_by_the_fake_transport():
    def program():
        complete(ring.allreduce(np.zeros(10 + 2 * transport().rank), transport(), Reduction(Sum, TABLE["float64"], 2)))

    with pytest.raises(CollectiveError, match=r"rank \d sent \d+ bytes, but rank \d expected \d+"):
        run_ranks(2, program)


def test_a_deadlock_is_told_by_the_fake_transport():
    def program():
        transport().receive(np.zeros(1), 1 - transport().rank, 7).wait()

    with pytest.raises(CollectiveError, match="deadlock: rank 0 waits to receive from rank 1; rank 1 waits to receive"):
        run_ranks(2, program, timeout_s=0.2)


def test_a_rank_that_returns_early_is_named():
    def program():
        if transport().rank != 1:
            complete(bruck.allgather(np.zeros(1), transport()))

    with pytest.raises(PeerLostError, match="rank 1, which has left the job") as caught:
        run_ranks(3, program)
    assert caught.value.lost_ranks == (1,)


def test_the_first_failure_is_the_one_that_is_raised():
    def program():
        if transport().rank == 2:
            raise KeyError("the cause")
        complete(bruck.allgather(np.zeros(1), transport()))

    with pytest.raises(KeyError, match="the cause"):
        run_ranks(3, program)
