"""Reduce-scatter, allgather and broadcast through shared memory, on threads: results, bits, late ranks, slot reuse."""

import itertools
import random
import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import shared, shared_halves
from ringreduce.collectives.ops import Average, Reduction, Sum
from ringreduce.collectives.partition import bounds_of, by_chunk
from ringreduce.collectives.shared import COPY, DONE, PACK, REDUCE, BufferPair
from ringreduce.transport import peer_memory
from ringreduce.transport.base import complete
from ringreduce.transport.window import SLOTS
from tests.support.on_threads import each_rank_of
from tests.support.reference import SIZES, assert_reduced, data
from tests.support.slots import SLOT_BYTES, on_a_host
from tests.support.tiers import parted

KINDS = ("reduce_scatter", "allgather", "broadcast", "allreduce")


@pytest.fixture(params=[False, True], ids=["slots", "peers"])
def reads_peers(request, monkeypatch):
    """Whether ranks read each other's memory where one slot is too short; ranks are threads here."""
    read, calls = peer_memory.read, []
    monkeypatch.setattr(peer_memory, "read", lambda *args: (calls.append(args), read(*args))[1])
    yield request.param
    assert bool(calls) == request.param


def counts_of(draw, size, mean):
    """How many elements each rank owns; many own none."""
    return [draw.choice([0, 0, 1, mean, 2 * mean]) for _ in range(size)]


def storage(name):
    return TABLE[name].storage


def reduce_scatter(region, name, op, counts, seed, *watch):
    """This rank's chunks of several tensors, counts[k][r] elements of tensor k; the sources stay as they were."""
    sources = [data(name, sum(each), region.rank, seed + k).view(storage(name)) for k, each in enumerate(counts)]
    before = [each.copy() for each in sources]
    targets = [np.empty(each[region.rank], storage(name)) for each in counts]
    chunks = by_chunk(sources, [bounds_of(each) for each in counts], region.size)
    complete(shared_halves.reduce_scatter(chunks, targets, region, Reduction(op, TABLE[name], region.size), *watch))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(sources, before, strict=True))
    for each in sources:
        each.view(np.uint8)[...] = 0x55
    return targets


def assert_scattered(results, name, op, counts, seed):
    """The bits of a sum in rank order: those of an all-reduce of the whole."""
    size = len(results)
    for k, each in enumerate(counts):
        arrays = [data(name, sum(each), rank, seed + k) for rank in range(size)]
        reduction, whole = Reduction(op, TABLE[name], size), np.empty(sum(each), storage(name))
        reduction.reduce_parts([array.view(storage(name)) for array in arrays], whole)
        if sum(each):
            assert_reduced(whole.view(arrays[0].dtype), op, arrays)
        for rank, (low, high) in enumerate(itertools.pairwise(bounds_of(each))):
            assert results[rank][k].tobytes() == whole[low:high].tobytes()


def allgather(region, name, counts, seed, *watch):
    """All ranks' elements of several tensors, rank r's being counts[k][r]."""
    sources = [data(name, each[region.rank], region.rank, seed + k) for k, each in enumerate(counts)]
    targets = [np.empty(sum(each), sources[k].dtype) for k, each in enumerate(counts)]
    by_owner = by_chunk(targets, [bounds_of(each) for each in counts], region.size)
    complete(shared_halves.allgather(sources, by_owner, region, *watch))
    for each in sources:
        each.view(np.uint8)[...] = 0x55
    return targets


def assert_gathered(results, name, counts, seed):
    for k, each in enumerate(counts):
        expected = np.concatenate([data(name, count, rank, seed + k) for rank, count in enumerate(each)])
        assert all(result[k].tobytes() == expected.tobytes() for result in results)


def broadcast(region, name, counts, root, seed):
    arrays = [data(name, each, region.rank, seed + k) for k, each in enumerate(counts)]
    complete(shared_halves.broadcast(arrays, root, region))
    results = [each.copy() for each in arrays]
    for each in arrays:
        each.view(np.uint8)[...] = 0x55
    return results


def assert_sent(results, name, counts, root, seed):
    for k, count in enumerate(counts):
        expected = data(name, count, root, seed + k)
        assert all(result[k].tobytes() == expected.tobytes() for result in results)


@pytest.mark.parametrize("size", SIZES)
def test_every_count_also_uneven_and_none(size, reads_peers):
    """One slot, several, and some that not all owners reach."""
    draw = random.Random(size)
    plan = [[[count] * size] for count in (0, 1, 700)]
    plan += [[counts_of(draw, size, mean) for _ in range(3)] for mean in (1, 100, 9000)]
    plan += [[[30_000] + [0] * (size - 1)], [[0] * (size - 1) + [30_000], [1] * size]]

    def program(region):
        region.slot_bytes, region.reads_peers = 16 << 10, reads_peers
        found = []
        for seed, counts in enumerate(plan):
            root = seed % size
            found.append(
                (
                    reduce_scatter(region, "float32", Sum, counts, 10 * seed),
                    allgather(region, "float32", counts, 10 * seed),
                    broadcast(region, "float32", [sum(each) for each in counts], root, 10 * seed),
                )
            )
        return found

    results = on_a_host(size, program)
    for seed, counts in enumerate(plan):
        scattered, gathered, sent = zip(*(each[seed] for each in results), strict=True)
        assert_scattered(scattered, "float32", Sum, counts, 10 * seed)
        assert_gathered(gathered, "float32", counts, 10 * seed)
        assert_sent(sent, "float32", [sum(each) for each in counts], seed % size, 10 * seed)


def mixed_plan(seed, size, length):
    """Operations of all kinds; one at least is an allgather that needs several slots."""
    draw = random.Random(seed)
    plan = [
        (draw.choice(KINDS), counts_of(draw, size, draw.choice([3, 300, 3000])), draw.randrange(size))
        for _ in range(length)
    ]
    return [*plan[: length // 2], ("allgather", [3000] * size, 0), *plan[length // 2 :]]


def run_one(region, kind, counts, root, seed, *watch):
    if kind == "reduce_scatter":
        return reduce_scatter(region, "float32", Average, [counts], seed, *watch)
    if kind == "allgather":
        return allgather(region, "float32", [counts], seed, *watch)
    if kind == "broadcast":
        return broadcast(region, "float32", [sum(counts)], root, seed)
    array = data("float32", sum(counts), region.rank, seed)
    length = region.slot_bytes // 4
    parts = [[BufferPair(array[low : low + length], array[low : low + length])] for low in range(0, array.size, length)]
    complete(shared.allreduce(parts, region, Reduction(Average, TABLE["float32"], region.size), *watch))
    result = array.copy()
    array[...] = np.nan
    return [result]


def assert_right(results, kind, counts, root, seed):
    if kind == "reduce_scatter":
        assert_scattered(results, "float32", Average, [counts], seed)
    elif kind == "allgather":
        assert_gathered(results, "float32", [counts], seed)
    elif kind == "broadcast":
        assert_sent(results, "float32", [sum(counts)], root, seed)
    elif sum(counts):
        assert_reduced(results[0][0], Average, [data("float32", sum(counts), r, seed) for r in range(len(results))])
        assert len({each[0].tobytes() for each in results}) == 1


@pytest.mark.parametrize("seed", parted(range(4), lambda seed: seed < 1))
@pytest.mark.parametrize("size", [2, 3, 5])
def test_late_ranks_in_operations_of_all_kinds_that_follow_each_other(size, seed):
    """Every operation has data of its own, so memory that was overwritten too early gives another result.

    Three read each other's memory where one slot is too short, as do those of the next test.
    """
    plan = mixed_plan(seed, size, 50)

    def program(region):
        region.slot_bytes, region.reads_peers = 2048, size == 3
        return [run_one(region, *each, 7 * k) for k, each in enumerate(plan)]

    results = on_a_host(size, program, slow=seed)
    for k, each in enumerate(plan):
        assert_right([result[k] for result in results], *each, 7 * k)


@pytest.mark.parametrize("seed", parted(range(3), lambda seed: seed < 1))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_nobody_packs_a_slot_that_another_still_reads(size, seed):
    """Sequence number s has the memory of s - SLOTS, with which all must be done; `watch` tells, and sleeps."""
    plan = [each for each in mixed_plan(seed, size, 40) if each[0] != "broadcast"]
    done, packed_over = [-1] * size, []

    def program(region):
        region.slot_bytes, region.reads_peers = 2048, size == 3
        draw = random.Random(f"{seed} {region.rank}")
        for number, each in enumerate(plan):
            first = region.sequence

            def watch(slot, phase, first=first):
                if draw.random() < 0.3:
                    time.sleep(draw.choice([0.0005, 0.003]))
                if phase == PACK:
                    packed_over.append(first + slot - SLOTS <= min(done))
                if phase == DONE:
                    done[region.rank] = first + slot
                    time.sleep(0)

            run_one(region, *each, number, watch)

    on_a_host(size, program)
    assert packed_over
    assert all(packed_over)


def test_a_rank_fills_all_slots_and_then_waits_for_one_that_still_reads_the_first():
    """Rank 1 reads nothing until rank 0 cannot go on; it packs nothing, and publishes that all the same."""
    packed = []

    def program(region):
        def watch(number, phase):
            if region.rank == 1 and phase == COPY and number == 0:
                until_s = time.monotonic() + 1
                while len(packed) < SLOTS and time.monotonic() < until_s:
                    time.sleep(0.002)
                time.sleep(0.05)
                ahead.append(len(packed))
            if region.rank == 0 and phase == REDUCE:
                packed.append(number)

        region.reads_peers = False
        allgather(region, "uint8", [[10 * SLOT_BYTES, 0]], 0, watch)

    ahead = []
    on_a_host(2, program)
    assert ahead == [SLOTS]


def test_what_a_rank_owns_is_not_packed():
    """Of a reduce-scatter, nor what it does not own of an allgather: told by the bytes that are written into slots."""
    counts = [[300, 500, 700]]

    def program(region):
        written = []
        region.write = lambda source, target: written.append(source.size) or np.copyto(target, source)
        reduce_scatter(region, "uint8", Sum, counts, 0)
        scattered = sum(written)
        written.clear()
        allgather(region, "uint8", counts, 0)
        gathered = sum(written)
        written.clear()
        broadcast(region, "uint8", [900], 1, 0)
        return scattered, gathered, sum(written)

    assert on_a_host(3, program) == [(1200, 300, 0), (1000, 500, 900), (800, 700, 0)]


@pytest.mark.parametrize("cannot", ["read", "say where"])
def test_what_one_rank_cannot_read_all_get_through_slots_from_then_on(cannot, monkeypatch):
    """A kernel that lets only some read, a device's memory; or more arrays than a slot has room to say where."""
    counts = [[5, 8]] * 40 if cannot == "say where" else [[300, 500]]
    read, ranks, calls = peer_memory.read, {}, []

    def read_or_not(*args):
        calls.append(args)
        return (cannot != "read" or ranks[threading.get_ident()] != 1) and read(*args)

    monkeypatch.setattr(peer_memory, "read", read_or_not)

    def program(region):
        ranks[threading.get_ident()] = region.rank
        region.slot_bytes = 256
        found = [allgather(region, "float32", counts, 0)]
        assert not region.reads_peers
        before = len(calls)
        found += [allgather(region, "float32", counts, seed) for seed in (1, 2)]
        assert len(calls) == before
        return found

    results = on_a_host(2, program)
    for seed in range(3):
        assert_gathered([each[seed] for each in results], "float32", counts, seed)


@each_rank_of(2)
def test_a_group_of_no_tensors_and_tensors_without_elements():
    assert (rr.grouped_allgather([]), rr.grouped_reducescatter([]), rr.grouped_allreduce([])) == ([], [], [])
    assert (rr.allgather(np.zeros((0, 3))).shape, rr.broadcast(np.zeros(0), 1).shape) == ((0, 3), (0,))
    assert rr.reducescatter(np.zeros((1, 0))).shape == (1 - rr.rank(), 0)
