"""The algorithms over MPI messages."""

import numpy as np
import pytest
from mpi4py import MPI

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import bruck, ring, tree
from ringreduce.collectives.ops import Average, Reduction, Sum
from ringreduce.transport import message
from ringreduce.transport.base import complete
from tests.support.reference import MATRIX, all_but_one_of_each_extended, assert_reduced, data, readable
from tests.support.tiers import parted

pytestmark = pytest.mark.mpi


def everyones(transport, name, count):
    return [data(name, count, rank) for rank in range(transport.size)]


@pytest.mark.parametrize(("name", "op"), all_but_one_of_each_extended(MATRIX), **readable)
def test_allreduce_of_every_type_and_op(transport, name, op):
    for count in (0, 1, transport.size - 1, transport.size + 1, 1000):
        arrays = everyones(transport, name, count)
        array = arrays[transport.rank].copy()
        reduction = Reduction(op, TABLE[name], transport.size)
        complete(ring.allreduce(array.view(TABLE[name].storage), transport, reduction, 512))
        assert_reduced(array, op, arrays)


@pytest.mark.parametrize("segment_bytes", parted([4096, 256 << 10, 64 << 20], lambda length: length == 4096))
def test_long_buffers_and_the_same_bits_everywhere(transport, segment_bytes):
    arrays = everyones(transport, "float32", 1_000_003)
    flat = arrays[transport.rank].copy()
    complete(ring.allreduce(flat, transport, Reduction(Average, TABLE["float32"], transport.size), segment_bytes))
    assert_reduced(flat, Average, arrays)
    for other in complete(bruck.allgather(flat[::1000].copy(), transport)):
        np.testing.assert_array_equal(other, flat[::1000])


def test_what_is_too_long_for_one_message_goes_in_several(transport, monkeypatch):
    monkeypatch.setattr(message, "MOST_BYTES", 1001)
    flat = data("float64", 1003, transport.rank)
    complete(tree.broadcast(flat, transport, 0, 64 << 10))
    np.testing.assert_array_equal(flat, data("float64", 1003, 0))


def test_many_in_a_row_do_not_mix(transport):
    for turn in range(50):
        flat = np.full(turn, transport.rank + turn, np.int64)
        complete(ring.allreduce(flat, transport, Reduction(Sum, TABLE["int64"], transport.size)))
        assert (flat == sum(rank + turn for rank in range(transport.size))).all()
        blocks = complete(bruck.allgather(np.array([transport.rank, turn]), transport))
        assert blocks.tolist() == [[rank, turn] for rank in range(transport.size)]


@pytest.mark.mpi(min_size=2)
def test_the_users_own_messages_do_not_meet_ours(transport):
    world = MPI.COMM_WORLD
    mine = np.full(3, world.rank, np.int64)
    request = world.Isend(mine, (world.rank + 1) % world.size, tag=ring.TAG)
    flat = np.ones(8)
    complete(ring.allreduce(flat, transport, Reduction(Sum, TABLE["float64"], transport.size)))
    theirs = np.empty(3, np.int64)
    world.Recv(theirs, (world.rank - 1) % world.size, tag=ring.TAG)
    request.Wait()
    assert theirs.tolist() == [(world.rank - 1) % world.size] * 3
    assert flat.tolist() == [transport.size] * 8
