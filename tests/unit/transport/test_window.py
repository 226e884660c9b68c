"""A host's shared memory over plain arrays: how it is cut, what flags tell, and who gets a part of it."""

import itertools
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.execution.host import HostResources
from ringreduce.kernels import native
from ringreduce.settings import MOST_REGIONS, Settings
from ringreduce.transport import blocks, futex, window
from ringreduce.transport.base import complete
from ringreduce.transport.threads import ThreadNetwork
from ringreduce.transport.window import CACHE_LINE_BYTES, PACKED, SLOTS, SUMMED, Region, Signatures, Window, block_bytes
from ringreduce.transport.world import World
from tests.support.loops import in_a_loop

SLOT_BYTES = 192
REGIONS = 3


def nothing():
    pass


def host_window(size, fence=nothing, **options):
    """The blocks of so many ranks, as one of them sees them, zeroed."""
    blocks = [np.zeros(block_bytes(SLOT_BYTES, REGIONS), np.uint8) for _ in range(size)]
    return Window(blocks, fence, **options)


def test_a_block_never_has_a_name(monkeypatch):
    """So that whatever kills a rank while blocks are made leaves nothing."""
    with tempfile.TemporaryDirectory(dir=blocks.SHARED_MEMORY) as folder:
        monkeypatch.setattr(blocks, "SHARED_MEMORY", folder)

        def allgather_object(value):
            assert os.listdir(folder) == []
            yield from ()
            return [value]

        (block,), why = complete(blocks.shared_blocks(1 << 20, [0], 0, allgather_object))
        assert (len(block), block.any(), why) == (1 << 20, False, "")


def views_of(shared, number, members):
    """Each member's own view of a region; they are ranks 10, 11, … of the world."""
    ranks = [10 + member for member in members]
    return [Region(shared, number, SLOT_BYTES, members, ranks, rank) for rank in range(len(members))]


@pytest.mark.parametrize("fence", sorted({window.memory_fence, window.fence_by_lock}, key=repr))
def test_no_flag_is_seen_before_its_data(fence):
    shared, count = host_window(2, fence), 1000

    def program(own):
        for number in range(count):
            slots = own.slots(number, np.dtype(np.int64))
            slots[own.rank][...] = 2 * number + own.rank
            own.publish(PACKED, number)
            own.arrival(PACKED, number).wait()
            assert [each.tolist() for each in slots] == [[2 * number + k] * len(each) for k, each in enumerate(slots)]
        return count

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(program, views_of(shared, 1, [0, 1]), timeout=60)) == [count] * 2


@in_a_loop("dtype", [np.uint8, np.float16, np.float32, np.complex128])
def test_every_slot_of_every_region_is_memory_of_its_own(dtype):
    shared = host_window(3)
    regions = [views_of(shared, number, [0, 1, 2]) for number in range(REGIONS)]
    for value, (number, sequence, rank) in enumerate(itertools.product(range(REGIONS), range(SLOTS), range(3))):
        regions[number][0].slots(sequence, np.dtype(dtype))[rank][...] = value
    for value, (number, sequence, rank) in enumerate(itertools.product(range(REGIONS), range(SLOTS), range(3))):
        for seen_by in range(3):
            slot = regions[number][seen_by].slots(sequence + 5 * SLOTS, np.dtype(dtype))[rank]
            assert (slot.dtype, slot.nbytes) == (dtype, SLOT_BYTES + CACHE_LINE_BYTES)
            assert (slot == value).all()
    flags = np.concatenate([block[: window.FLAGS_BYTES] for block in shared.blocks])
    assert not flags.any(), "data is nowhere among the flags"


def test_a_sequence_number_has_arrived_when_every_member_has_published_it():
    first, second, third = views_of(host_window(3), 1, [0, 1, 2])
    assert not first.arrived(PACKED, 0)
    first.publish(PACKED, 0)
    third.publish(PACKED, 1)
    assert not second.arrived(PACKED, 0)
    assert second.late(PACKED, 0) == 11
    second.publish(PACKED, 0)
    for each in (first, second, third):
        assert each.arrived(PACKED, 0)
        assert not each.arrived(PACKED, 1)
        assert not each.arrived(SUMMED, 0), "the other flag is untouched"
        assert each.late(PACKED, 1) == 10
    assert third.late(PACKED, 0) == 12, "nobody is late: this rank's own"


def test_regions_and_members_that_are_no_part_of_it_do_not_matter():
    shared = host_window(4)
    one, other = views_of(shared, 0, [1, 3])
    elsewhere = views_of(shared, 2, [0, 1, 2, 3])
    for each in elsewhere:
        each.publish(PACKED, 7)
    assert not one.arrived(PACKED, 0)
    one.publish(PACKED, 0)
    other.publish(PACKED, 0)
    assert one.arrived(PACKED, 0)
    assert other.late(PACKED, 1) == 11, "by its rank in the world"
    assert elsewhere[0].arrived(PACKED, 7)


def test_every_region_that_settings_allow_has_flags_of_its_own():
    least = Settings(fusion_buffer_bytes=1 << 20, fusion_slot_bytes=64, shared_slot_bytes=64)
    assert least.shared_regions == MOST_REGIONS
    blocks = [np.zeros(block_bytes(64, MOST_REGIONS), np.uint8)]
    regions = [Region(Window(blocks), k, 64, [0], [0], 0) for k in range(MOST_REGIONS)]
    for number, region in enumerate(regions):
        region.publish(PACKED, 2 * number)
        region.publish(SUMMED, 2 * number + 1)
    for number, region in enumerate(regions):
        for flag, sequence in ((PACKED, 2 * number), (SUMMED, 2 * number + 1)):
            assert region.arrived(flag, sequence)
            assert not region.arrived(flag, sequence + 1)
    assert not blocks[0][window.FLAGS_BYTES :].any()


def test_a_fence_stands_before_a_flag_is_written_and_after_it_was_read():
    story = []

    def fence():
        story.append(flags())

    shared = host_window(1, fence)
    (region,) = views_of(shared, 0, [0])

    def flags():
        return int(shared.blocks[0][: window.FLAGS_BYTES].view(np.int64).max())

    region.publish(PACKED, 4)
    assert story[0] == 0, "the fence came first"
    assert story[1:] == [5] * futex.EXISTS, "before it looks who sleeps"
    story.clear()
    assert region.arrived(PACKED, 4)
    assert story == [5]
    assert not region.arrived(PACKED, 5)
    assert len(story) == 1


@pytest.mark.timeout(30)
@pytest.mark.skipif(not futex.EXISTS, reason="no futex here: nobody sleeps")
def test_who_sleeps_is_woken(monkeypatch, either_kernels):
    """By whoever publishes the flag that it waits for, from Python or from the compiled module."""
    monkeypatch.setattr(window, "SLEEP_S", 3600.0)
    mine, other = views_of(host_window(2), 0, [0, 1])
    array = np.ones(8, np.float32)
    for number in range(3):
        mine._sleeps = 1
        with ThreadPoolExecutor() as pool:
            found = pool.submit(mine.arrived_soon, PACKED, number)
            mine.publish(PACKED, number)
            while not mine._asleep[0][0]:
                time.sleep(1e-3)
            time.sleep(0.03)  # until it is in the kernel
            if native.module is None:
                other.publish(PACKED, number)
            else:
                other.compiled.allreduce([array], [array], 0, 0, 1.0, 1.0, 1.0, number, False, 8).advance(0.0, 0.0)
            assert found.result()


@pytest.mark.skipif(not futex.EXISTS, reason="no futex here: nobody sleeps")
def test_a_wait_sleeps_where_others_have_the_core(monkeypatch):
    shared, slept = host_window(2), []
    mine, _ = views_of(shared, 0, [0, 1])
    monkeypatch.setattr(futex, "wait", lambda address, value, limit_s: slept.append((address, value)))
    mine.publish(PACKED, 0)
    monkeypatch.setattr(window, "TAKEN_S", 3600.0)
    assert not mine.arrived_soon(PACKED, 0)
    assert slept == [], "it yields"
    monkeypatch.setattr(window, "TAKEN_S", 1e-3)
    monkeypatch.setattr(os, "sched_yield", lambda: time.sleep(2 * window.TAKEN_S))
    assert not mine.arrived_soon(PACKED, 0)
    assert slept == []
    assert not mine.arrived_soon(PACKED, 0)
    assert slept[-1] == (shared.blocks[1].ctypes.data, 0)


def test_whoever_makes_a_region_again_starts_from_zero():
    shared = host_window(2)
    for each in views_of(shared, 0, [0, 1]):
        each.publish(PACKED, 9)
    one, other = views_of(shared, 0, [0, 1])
    assert one.sequence == 0
    assert not one.arrived(PACKED, 0)
    one.publish(PACKED, 0)
    other.publish(PACKED, 0)
    assert one.arrived(PACKED, 0)


def test_a_wait_ends_when_the_last_member_comes_and_checks_on_it_meanwhile():
    checked = []

    def check(rank):
        checked.append(rank)
        if len(checked) == 3:
            other.publish(SUMMED, 2)

    one, other = views_of(host_window(2, check=check), 0, [0, 1])
    one.publish(SUMMED, 2)
    arrival = one.arrival(SUMMED, 2)
    assert not arrival.done()
    assert arrival.peer == 11
    arrival.wait()
    assert checked == [11] * 3
    assert arrival.done()
    assert arrival.peer == 10


def test_a_check_that_raises_ends_the_wait():
    def check(rank):
        raise ConnectionError(f"rank {rank} is gone")

    one, _ = views_of(host_window(2, check=check), 0, [0, 1])
    one.publish(PACKED, 0)
    with pytest.raises(ConnectionError, match="rank 11 is gone"):
        one.arrival(PACKED, 0).wait()


def host_of(rank, hosts, regions=2):
    settings = Settings(fusion_buffer_bytes=8 * 64 * regions, fusion_slot_bytes=64, shared_slot_bytes=64)
    neighbours = hosts.count(hosts[rank])
    blocks = [np.zeros(block_bytes(64, regions), np.uint8) for _ in range(neighbours)]
    return HostResources(
        World(rank, len(hosts), tuple(hosts)), ThreadNetwork(len(hosts)).transport(rank), settings, Window(blocks)
    )


@pytest.mark.parametrize(
    ("regions", "sets", "given"),
    [
        (2, [range(6), [0, 1], [2, 3], [1, 2], [4, 5], [3, 4]], [0, 1, 1, None, 1, None]),
        (3, [[1, 2]] * 5 + [[0, 3]], [0, 1, 2, None, None, 0]),
    ],
    ids=["others share", "the same ranks"],
)
def test_sets_with_a_common_rank_have_different_regions(regions, sets, given):
    host = host_of(0, [0] * 6, regions)
    assert [host.reserve(members)[1] for members in sets] == given


def test_flags_for_gpu_arrays_are_for_more_sets_than_regions():
    host = host_of(0, [0] * 4)
    given = [host.reserve([1, 2])[1:] for _ in range(MOST_REGIONS + 1)]
    assert given == [(0, 0), (1, 1), *((None, number) for number in range(2, MOST_REGIONS)), (None, None)]


@pytest.mark.parametrize(
    ("rank", "members", "places", "ranks"),
    [(4, [0, 4, 5], [1, 2], (4, 5)), (0, [0, 4, 5], [0], (0,)), (5, [1, 3, 5], [0, 2], (1, 5))],
)
def test_a_sets_region_holds_its_members_on_this_host(rank, members, places, ranks):
    """Hosts 0: ranks 0, 2, 3; 1: ranks 1, 4, 5."""
    host = host_of(rank, [0, 1, 0, 0, 1, 1])
    region = host.region(0, members)
    assert (region.size, region.ranks, region.ranks[region.rank]) == (len(places), ranks, rank)
    for place, slot in zip(places, region.slots(0, np.dtype(np.uint8)), strict=True):
        assert np.shares_memory(slot, host.window.blocks[place])


def test_without_a_window_no_set_gets_a_region():
    world = World(0, 2, (0, 0))
    host = HostResources(world, ThreadNetwork(world.size).transport(0), Settings())
    assert host.reserve([0, 1])[1:] == (None, None)
    assert host.region(None, [0, 1]) is None


def test_a_rank_that_signs_its_next_operation_leaves_the_hash_of_this_one_readable():
    blocks = [np.zeros(block_bytes(64, 2), np.uint8) for _ in range(2)]
    first, second = (Signatures(Window(blocks), 1, [0, 1], [0, 1], rank) for rank in range(2))
    second.sign(100)
    for number in range(5):
        assert second.arrived(PACKED, number) is False
        assert first.sign(number) == number
        assert first.arrived(PACKED, number)
        second.sign(101 + number)  # it may go on at once, before the other reads
        assert first.read(number) == [number, 100 + number]


@in_a_loop("name", TABLE)
@in_a_loop("count", [1, 100, 5001, 65536])
def test_reading_copies_all_bits_of_all_types(name, count):
    dtype = TABLE[name].storage
    source = np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    around = np.zeros(count + 2, dtype)
    Region.read(source, around[1:-1])
    assert around[1:-1].tobytes() == source.tobytes()
    assert not around[[0, -1]].view(np.uint8).any()
