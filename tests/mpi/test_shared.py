"""Shared memory between real ranks: that it is used, by all types and ops, after shutdown again, by process sets."""

import gc
import itertools
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.collectives.cost_model import Constants
from ringreduce.collectives.partition import chunk_bounds
from ringreduce.transport import peer_memory
from ringreduce.transport.counters import group_bytes
from ringreduce.transport.window import block_bytes
from tests.support import on_ranks
from tests.support.reference import MATRIX, assert_reduced, data
from tests.support.tiers import parted

pytestmark = pytest.mark.mpi(min_size=2)
SLOT_BYTES = 32 << 10
LONG = 40_001
"""Elements that take several slots in every type."""


@pytest.fixture(scope="module", autouse=True)
def small_slots():
    """A world with little shared memory, that uses it."""
    with on_ranks.worlds() as form:
        little = {"shared_slot_bytes": SLOT_BYTES, "fusion_buffer_bytes": 4 << 20, "fusion_slot_bytes": 1 << 20}
        form(**little, algorithm="shared")
        yield


def everyones(name, count, seed=0):
    return [data(name, count, rank, seed) for rank in range(rr.size())]


def assert_equal_everywhere(result):
    assert len({each.tobytes() for each in rr.allgather_object(result)}) == 1


def test_what_was_found_is_told():
    info = rr.info()
    assert info.usable_algorithms == ("ring", "halving", "direct", "doubling", "shared")
    assert info.shared_memory_bytes == block_bytes(SLOT_BYTES, 16, group_bytes(rr.info().settings["cache_capacity"]))
    assert info.constants == Constants(), "nothing is measured where memory is always shared"
    assert len(set(rr.allgather_object((info.algorithm, str(info.constants))))) == 1, "alike on all ranks"


@pytest.mark.parametrize("seed", parted(range(3), lambda seed: seed == 0))
def test_many_operations_of_ranks_that_are_late_by_turns(seed):
    """Short and long ones, alone and in groups; nobody waits for the others between them."""
    plan, mood = random.Random(seed), random.Random(f"{seed} {rr.rank()}")
    for step in range(60):
        name, op = plan.choice(MATRIX)
        counts = [plan.choice([1, 100, 5000, 50_000]) for _ in range(plan.randint(1, 4))]
        arrays = [[data(name, count, rank, step + k) for k, count in enumerate(counts)] for rank in range(rr.size())]
        if mood.random() < 0.2:
            time.sleep(mood.choice([0.0002, 0.003, 0.02]))
        results = rr.grouped_allreduce(arrays[rr.rank()], op=op)
        for result, *given in zip(results, *arrays, strict=True):
            assert_reduced(result, op, given)


@pytest.mark.parametrize("seed", parted(range(2), lambda seed: seed == 0))
def test_its_halves_and_broadcast_between_all_reduces_of_ranks_that_are_late_by_turns(seed):
    """Uneven counts, no rows, one slot and many; no messages carry data."""
    plan, mood = random.Random(seed), random.Random(f"{seed} {rr.rank()}")
    for step in range(40):
        name = plan.choice(["float32", "float64", "int16", "bool", "complex64"])
        rows = [plan.choice([0, 1, 3, 20_000]) for _ in range(rr.size())]
        total, root = sum(rows), plan.randrange(rr.size())
        arrays = [data(name, total, rank, step) for rank in range(rr.size())]
        if mood.random() < 0.2:
            time.sleep(mood.choice([0.0002, 0.003, 0.02]))
        mine = data(name, rows[rr.rank()], rr.rank(), step)
        gathered, short = rr.grouped_allgather([mine, np.array([rr.rank()])])
        assert gathered.tobytes() == b"".join(data(name, n, r, step).tobytes() for r, n in enumerate(rows))
        assert short.tolist() == list(range(rr.size()))
        part = rr.reducescatter(arrays[rr.rank()], op=rr.Sum)
        whole = rr.allreduce(arrays[rr.rank()], op=rr.Sum)
        low, high = chunk_bounds(total, rr.size())[rr.rank() : rr.rank() + 2]
        assert part.tobytes() == whole[low:high].tobytes(), "the bits of an all-reduce"
        assert rr.broadcast(arrays[rr.rank()], root).tobytes() == arrays[root].tobytes()
        assert rr.broadcast_object({"step": step, "rank": rr.rank()}, root) == {"step": step, "rank": root}


def test_a_long_gather_reads_the_other_ranks_memory_where_the_kernel_lets_them(monkeypatch):
    """As root, or where a user's processes may read each other's; elsewhere the slots give the same."""
    read, could = peer_memory.read, []
    monkeypatch.setattr(peer_memory, "read", lambda *args: (could.append(read(*args)), could[-1])[1])
    gathered = rr.allgather(data("float32", LONG, rr.rank(), 0))
    assert gathered.tobytes() == b"".join(each.tobytes() for each in everyones("float32", LONG))
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0":
        assert could == [True] * (rr.size() - 1)


def mapped_blocks():
    """How many files without a name this process has mapped there: the blocks."""
    return sum("/dev/shm/#" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_after_shutdown_there_is_a_new_window_and_the_old_one_is_gone(anew):
    for sequence in range(4):
        anew()
        window = runtime.current("test").engine.host.window
        assert mapped_blocks() == rr.size()
        assert not any(block[4096:].any() for block in window.blocks[rr.local_rank() : rr.local_rank() + 1]), "zeroed"
        arrays = everyones("float32", LONG, sequence)
        assert_reduced(rr.allreduce(arrays[rr.rank()]), rr.Average, arrays)
        assert len(rr.allgather_object(None)) == rr.size()


@pytest.mark.parametrize("algorithm", ["shared", "ring", "direct", "doubling"], ids=lambda name: f"by {name}")
def test_each_can_be_asked_for(anew, algorithm):
    anew(algorithm=algorithm)
    assert rr.info().algorithm == algorithm
    for (name, op), count in itertools.product(MATRIX[::9], (1, 1000, 50_000)):
        arrays = everyones(name, count)
        result = rr.allreduce(arrays[rr.rank()], op=op)
        assert_reduced(result, op, arrays)
        assert_equal_everywhere(result)


def test_a_demand_that_cannot_be_met_is_refused_and_init_works_again(anew):
    with pytest.raises(rr.SettingsError, match=r"RINGREDUCE_ALGORITHM=hierarchical: needs several hosts.*on 1 host;"):
        anew(algorithm="hierarchical")
    with pytest.raises(rr.SettingsError, match=r"RINGREDUCE_ALGORITHM='rings': expected auto or one of shared"):
        anew(algorithm="rings")
    with pytest.raises(rr.SettingsError, match=r"RINGREDUCE_COSTS: 'wait=1'; expected name=number"):
        anew(algorithm="auto", costs="wait=1")
    anew(costs="wire_us=3")
    assert rr.info().constants == Constants(wire_us=3)
    assert rr.allreduce(np.float64(1), op=rr.Sum) == rr.size()


def test_process_sets_move_data_through_regions_of_their_own(anew):
    """At the same time; there are two regions, so the last set, whose ranks are in two others, sends messages."""
    if rr.size() < 3:
        pytest.skip("two ranks: there are no sets that overlap")
    sets = [rr.ProcessSet([0, 2]), rr.ProcessSet([1, 2])]
    anew(sets, fusion_buffer_bytes=16 * SLOT_BYTES, fusion_slot_bytes=SLOT_BYTES)
    mine = [each for each in (rr.global_process_set, *sets) if each.included()]
    states = runtime.current("test").engine.states
    told = {each.process_set_id: states[each.process_set_id].algorithms.text() for each in mine}
    assert {number: text == "shared" for number, text in told.items()} == {number: number < 2 for number in told}, told
    for step in range(10):
        handles = {}
        for each in random.Random(f"{step} {rr.rank()}").sample(mine, len(mine)):
            number = each.process_set_id
            array = data("float32", LONG, rr.rank(), step + 100 * number)
            handles[number] = rr.allreduce_async(array, name=f"{number}", op=rr.Sum, process_set=each)
        for each in mine:
            ranks = each.ranks or range(rr.size())
            arrays = [data("float32", LONG, rank, step + 100 * each.process_set_id) for rank in ranks]
            assert_reduced(rr.synchronize(handles[each.process_set_id]), rr.Sum, arrays)


def test_each_ranks_block_is_mapped_once():
    gc.collect()  # the frames of a test before, which pytest had for its report, may hold the blocks of its world
    assert mapped_blocks() == rr.size()
