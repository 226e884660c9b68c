"""init, shutdown, and who is where, under a real launcher."""

import os

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce import runtime

pytestmark = pytest.mark.mpi


@pytest.fixture
def fresh():
    """The test leaves and enters the world as it likes; afterwards it is the usual one again."""
    rr.shutdown()
    yield
    rr.shutdown()
    rr.init()


def test_ranks_are_those_of_mpi_and_of_the_launcher():
    world = MPI.COMM_WORLD
    assert (rr.rank(), rr.size()) == (world.rank, world.size)
    assert (rr.local_rank(), rr.local_size()) == (world.rank, world.size), "one host"
    assert (rr.cross_rank(), rr.cross_size()) == (0, 1)
    assert rr.is_homogeneous()
    if "RANK" in os.environ:
        told = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        assert told == [rr.rank(), rr.size(), rr.local_rank(), rr.local_size()]


def test_init_twice_changes_nothing():
    before = runtime.current("test")
    rr.init()
    assert runtime.current("test") is before


def test_init_after_shutdown_makes_a_new_generation(fresh):
    rr.init()
    first = runtime.current("test").world.generation
    rr.shutdown()
    rr.shutdown()
    with pytest.raises(rr.NotInitializedError, match=r"rank\(\): ringreduce has not been initialized"):
        rr.rank()
    rr.init()
    assert runtime.current("test").world.generation == first + 1
    assert rr.allreduce(np.float64(rr.rank()), op=rr.Sum) == sum(range(rr.size()))


def test_a_communicator_of_the_user(fresh):
    world = MPI.COMM_WORLD
    comm = world.Split(world.rank % 2, -world.rank)
    rr.init(comm)
    assert (rr.rank(), rr.size()) == (comm.rank, comm.size)
    assert rr.allgather_object(world.rank) == [r for r in reversed(range(world.size)) if r % 2 == world.rank % 2]
    rr.shutdown()
    comm.Barrier()  # the user's communicator is still the user's
    comm.Free()


@pytest.mark.mpi(min_size=3)
def test_a_list_of_ranks(fresh):
    world = MPI.COMM_WORLD
    if world.rank == 1:
        with pytest.raises(ValueError, match=r"init\(comm=\[2, 0\]\) was called on rank 1, which is not in the list"):
            rr.init([2, 0])
    elif world.rank in (0, 2):
        rr.init([2, 0])
        assert rr.allgather_object(world.rank) == [2, 0]
        rr.shutdown()
    with pytest.raises(
        ValueError, match=rf"init\(comm=\[0, 0\]\): expected different ranks from 0 to {world.size - 1}"
    ):
        rr.init([0, 0])
    world.Barrier()


def test_a_rank_that_is_not_in_its_communicator_does_not_take_that_of_all(fresh):
    nobodys = MPI.COMM_WORLD.Split(MPI.UNDEFINED)
    for comm, got in (nobodys, "MPI.COMM_NULL"), ("0-1", "'0-1'"):
        with pytest.raises(ValueError, match=rf"init\(comm={got}\): expected a list of ranks, or an mpi4py comm"):
            rr.init(comm)
    assert not rr.is_initialized()


def test_process_sets_of_communicators_of_which_each_rank_passes_its_own(fresh):
    world = MPI.COMM_WORLD
    comm = world.Split(world.rank % 2, -world.rank)
    mine = rr.ProcessSet(comm)
    everyone = list(range(world.size))
    if world.size < 2:
        with pytest.raises(ValueError, match=r"process_sets: \[0\] has the same ranks as that of all ranks"):
            rr.init(process_sets=[mine])
        comm.Free()
        return
    rr.init(process_sets=[mine])
    assert mine.ranks == everyone[world.rank % 2 :: 2]
    assert mine.rank() == world.rank // 2
    assert rr.get_process_set_ids_and_ranks() == {0: everyone, 1: everyone[::2], 2: everyone[1::2]}
    assert rr.allreduce(np.float64(world.rank), op=rr.Sum, process_set=mine) == sum(everyone[world.rank % 2 :: 2])
    rr.shutdown()
    comm.Barrier()
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_a_split_leaves_out_is_in_no_process_set_of_it(fresh):
    world = MPI.COMM_WORLD
    comm = world.Split(MPI.UNDEFINED if world.rank == 0 else 0)
    mine, rest = rr.ProcessSet(comm), list(range(1, world.size))
    rr.init(process_sets=[mine])
    assert (mine.included(), mine.ranks) == ((False, []) if world.rank == 0 else (True, rest))
    assert rr.get_process_set_ids_and_ranks() == {0: list(range(world.size)), 1: rest}
    if world.rank:
        assert rr.allreduce(np.float64(world.rank), op=rr.Sum, process_set=mine) == sum(rest)
    else:
        with pytest.raises(rr.InputError, match="add_process_set"):
            rr.allreduce(np.float64(0), process_set=mine)
    rr.shutdown()
    world.Barrier()


def test_process_sets_that_differ_are_told_on_all_ranks(fresh):
    world = MPI.COMM_WORLD
    last = world.size - 1
    if last == 0:
        with pytest.raises(ValueError, match=r"process set \[1\]: expected different ranks from 0 to 0, at least one"):
            rr.init(process_sets=[[1]])
        return
    message = rf"rank {last} of {world.size}, init 'settings' .*: process_sets=\[\[1\]\], but rank 0 has .*=\[\[0\]\]"
    with pytest.raises(rr.MismatchError, match=message):
        rr.init(process_sets=[[1] if world.rank == last else [0]])
    world.Barrier()
