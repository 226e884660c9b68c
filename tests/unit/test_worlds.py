"""Later worlds of an elastic job, from the first one and a list."""

import numpy as np
import pytest

from ringreduce.errors import StartupError
from ringreduce.execution.host import Host, clear_block, window_bytes
from ringreduce.membership import Membership
from ringreduce.settings import Settings
from ringreduce.startup.survivors import Origin
from ringreduce.startup.worlds import check, living_sets, lost_error
from ringreduce.transport.counters import group_bytes
from ringreduce.transport.threads import Exchange
from ringreduce.transport.window import FLAGS_BYTES, Window
from ringreduce.world import World

SETTINGS = Settings(fusion_buffer_bytes=1 << 20, shared_slot_bytes=1 << 16, fusion_slot_bytes=1 << 16)
HOSTS = (0, 0, 2, 2, 2)


def origin(rank):
    """Of rank `rank` of five on two hosts; each block holds its owner's rank."""
    own = [each for each in range(5) if HOSTS[each] == HOSTS[rank]]
    window = Window([np.full(window_bytes(SETTINGS), each, np.uint8) for each in own])
    world = World(rank, 5, HOSTS, origins=tuple(range(5)))
    return Origin(world, Host(world, Exchange(5).transport(rank), SETTINGS, window), [0.0, 0.0, 70.0, 70.0, 70.0])


def later(rank, ranks, number=4):
    start = origin(rank)
    return start, start.world_of(Membership(number, tuple(ranks), {}))


def test_ranks_count_in_the_order_of_the_list():
    _, world = later(4, [1, 2, 4])
    assert (world.rank, world.size, world.hosts, world.number) == (2, 3, (0, 2, 2), 4)
    assert (world.local_rank, world.local_size, world.origins) == (1, 2, (1, 2, 4))


def test_the_window_is_what_the_survivors_own():
    start, world = later(4, [0, 1, 2, 4])
    host = start.host_of(world, Exchange(4).transport(3))
    assert [each[0] for each in host.window.blocks] == [2, 4]
    assert (host.constants, host.cores) == (start.host.constants, start.host.cores)


def test_where_no_two_survivors_share_a_host_no_rank_has_a_window():
    for rank in (1, 4):
        start, world = later(rank, [1, 4])
        assert start.host_of(world, Exchange(2).transport(world.rank)).window is None


def test_clocks_count_from_the_new_rank_0():
    start, world = later(4, [2, 1, 4])
    assert start.offsets_of(world) == [0.0, -70.0, 0.0]


def test_a_block_is_as_new_but_for_its_slots():
    start = origin(1)
    clear_block(start.host.window, SETTINGS, 1)
    other, own = start.host.window.blocks
    assert set(other) == {0}
    kept = np.flatnonzero(own)
    assert (kept[0], kept[-1]) == (
        FLAGS_BYTES,
        own.size - SETTINGS.shared_regions * group_bytes(SETTINGS.cache_capacity) - 1,
    )


def test_sets_whose_members_all_live_keep_their_numbers():
    _, world = later(4, [0, 2, 4])
    sets = [[0, 4], [1, 2], [2, 4], "it was removed"]
    found = living_sets(sets, world, {1: "was killed by SIGKILL"})
    assert found[0] == (0, 2)
    assert found[1] == "it had ranks 1-2 of the job's start, and rank 1 was killed by SIGKILL"
    assert found[2:] == [(1, 2), "it was removed"]


def test_the_error_names_the_lost_and_how_they_ended():
    _, world = later(4, [0, 2, 4])
    error = lost_error(world, Membership(5, (0, 4), {2: "was killed by SIGKILL"}))
    assert (str(error), error.lost_ranks) == ("rank 1 of 3 was killed by SIGKILL", (1,))
    error = lost_error(world, Membership(5, (0, 2, 4, 3), {}))
    assert str(error) == "ranks have joined: there are 4 now, and the world is formed anew"


@pytest.mark.parametrize(
    ("settings", "comm", "worlds", "message"),
    [
        (Settings(elastic=True), None, 0, "ringrun has not started this rank"),
        (Settings(elastic=True, error_file="x"), [0, 1], 0, "pass no comm"),
        (Settings(elastic=True, error_file="x"), None, 1, "calls init\\(\\) once"),
    ],
)
def test_where_an_elastic_job_cannot_begin_is_said(settings, comm, worlds, message):
    with pytest.raises(StartupError, match=message):
        check(settings, comm, worlds)
