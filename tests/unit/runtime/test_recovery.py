"""Later worlds of an elastic job, from the first one and a list; whole jobs are in test_simulated_membership.py."""

import numpy as np
import pytest

from ringreduce.errors import StartupError
from ringreduce.execution.host import HostResources, clear_block, window_bytes
from ringreduce.runtime import Setup
from ringreduce.runtime.recovery.elastic_runtime import check_start, living_sets, lost_error
from ringreduce.runtime.recovery.membership import Membership
from ringreduce.runtime.recovery.rendezvous import setup_of, world_of
from ringreduce.settings import Settings
from ringreduce.transport.counters import group_bytes
from ringreduce.transport.threads import ThreadNetwork
from ringreduce.transport.window import FLAGS_BYTES, Window
from ringreduce.transport.world import World

SETTINGS = Settings(fusion_buffer_bytes=1 << 20, shared_slot_bytes=1 << 16, fusion_slot_bytes=1 << 16)
HOSTS = (0, 0, 2, 2, 2)


def start_of(rank):
    """The job's start, on rank `rank` of five on two hosts; each block holds its owner's rank."""
    own = [each for each in range(5) if HOSTS[each] == HOSTS[rank]]
    window = Window([np.full(window_bytes(SETTINGS), each, np.uint8) for each in own])
    world, transport = World(rank, 5, HOSTS, origins=tuple(range(5))), ThreadNetwork(5).transport(rank)
    return Setup(world, transport, HostResources(world, transport, SETTINGS, window), [0.0, 0.0, 70.0, 70.0, 70.0])


def later(rank, ranks):
    start = start_of(rank)
    world = world_of(start.world, Membership(4, tuple(ranks), {}))
    return start, setup_of(start, world, ThreadNetwork(len(ranks)).transport(world.rank), [])


def test_ranks_count_in_the_order_of_the_list():
    world = later(4, [1, 2, 4])[1].world
    assert (world.rank, world.size, world.hosts, world.number) == (2, 3, (0, 2, 2), 4)
    assert (world.local_rank, world.local_size, world.origins) == (1, 2, (1, 2, 4))


def test_the_window_is_what_the_survivors_own():
    start, setup = later(4, [0, 1, 2, 4])
    assert [each[0] for each in setup.host.window.blocks] == [2, 4]
    assert (setup.host.constants, setup.host.cores) == (start.host.constants, start.host.cores)


def test_where_no_two_survivors_share_a_host_no_rank_has_a_window():
    for rank in (1, 4):
        assert later(rank, [1, 4])[1].host.window is None


def test_clocks_count_from_the_new_rank_0():
    assert later(4, [2, 1, 4])[1].clock_offsets_us == [0.0, -70.0, 0.0]


def test_a_block_is_as_new_but_for_its_slots():
    start = start_of(1)
    clear_block(start.host.window, SETTINGS, 1)
    other, own = start.host.window.blocks
    assert set(other) == {0}
    kept = np.flatnonzero(own)
    assert (kept[0], kept[-1]) == (
        FLAGS_BYTES,
        own.size - SETTINGS.shared_regions * group_bytes(SETTINGS.cache_capacity) - 1,
    )


def test_sets_whose_members_all_live_keep_their_numbers():
    world = later(4, [0, 2, 4])[1].world
    sets = [[0, 4], [1, 2], [2, 4], "it was removed"]
    found = living_sets(sets, world, {1: "was killed by SIGKILL"})
    assert found[0] == (0, 2)
    assert found[1] == "it had ranks 1-2 of the job's start, and rank 1 was killed by SIGKILL"
    assert found[2:] == [(1, 2), "it was removed"]


def test_the_error_names_the_lost_and_how_they_ended():
    world = later(4, [0, 2, 4])[1].world
    error = lost_error(world, Membership(5, (0, 4), {2: "was killed by SIGKILL"}))
    assert (str(error), error.lost_ranks) == ("rank 1 of 3 was killed by SIGKILL", (1,))
    error = lost_error(world, Membership(5, (0, 2, 4, 3), {}))
    assert str(error) == "ranks have joined: there are 4 now, and the world is formed again"


@pytest.mark.parametrize(
    ("settings", "comm", "worlds", "message"),
    [
        (Settings(elastic=True), None, 0, "ringrun has not started this rank"),
        (Settings(elastic=True, error_file="x"), [0, 1], 0, "leave comm out"),
        (Settings(elastic=True, error_file="x"), None, 1, "calls init\\(\\) once"),
    ],
)
def test_where_an_elastic_job_cannot_begin_is_said(settings, comm, worlds, message):
    with pytest.raises(StartupError, match=message):
        check_start(settings, comm, worlds)
