"""The hierarchical all-reduce on threads: results, their bits, what each wire carries, and late ranks."""

import math
import random
from collections import Counter

import numpy as np
import pytest

from ringreduce import runtime
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import hierarchical
from ringreduce.collectives.cost_model import UNITS_AHEAD
from ringreduce.collectives.ops import Reduction, Sum
from ringreduce.collectives.shared import DONE, PACK
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support.reference import assert_reduced, data
from tests.support.slots import be_slow, dawdle, random_plan, reduced
from tests.support.tiers import parted

LAYOUTS = [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 2, 2, 2], [0, 1, 0, 1], [1, 0, 0], [0, 0, 0, 1, 1, 1, 2, 2, 2]]
SLOT_BYTES = 4096
KNOBS = Settings(fusion_buffer_bytes=1 << 20, fusion_slot_bytes=4096, shared_slot_bytes=SLOT_BYTES)


def algorithms():
    """This rank's, of the set of all ranks."""
    return runtime.current("test").engine.states[0].algorithms


def reduce(array, reduction, capacity=10**9, pieces=1, in_place=True, segment_bytes=1 << 20, watch=None, halves=None):
    """This rank's result; both memories are its own again at once, and it writes nonsense there."""
    options = [watch] if watch else []
    algorithms().hierarchy.halved_bytes = math.inf if halves else 0

    def run(slots):
        complete(
            hierarchical.allreduce(
                slots, algorithms().region, algorithms().hierarchy, reduction, segment_bytes, *options
            )
        )

    return reduced(array, reduction.element.storage, capacity, pieces, in_place, run)


def run_plan(hosts, plan, prepare=lambda: None, **options):
    """Operations one after the other, for which no rank waits; `plan`: dtype, op, count and further arguments."""
    size = len(hosts)
    everyones = [[data(name, count, rank, k) for rank in range(size)] for k, (name, _, count, _) in enumerate(plan)]

    def program():
        prepare()
        rank = runtime.current("test").world.rank
        return [
            reduce(arrays[rank], Reduction(op, TABLE[name], size).on_wire(), **each)
            for arrays, (name, op, _, each) in zip(everyones, plan, strict=True)
        ]

    results = run_ranks(size, program, hosts=hosts, settings=KNOBS, timeout_s=40, **options)
    for k, (_, op, _, _) in enumerate(plan):
        assert_reduced(results[0][k], op, everyones[k], hosts)
        assert all(each[k].tobytes() == results[0][k].tobytes() for each in results), "the same bits on every rank"


@pytest.mark.parametrize("seed", parted(range(3), lambda seed: seed < 1))
@pytest.mark.parametrize("hosts", LAYOUTS[:4], ids=str)
def test_a_rank_that_is_late_never_reads_what_came_later(hosts, seed):
    """Every operation has data of its own, so memory that was overwritten too early gives another result."""
    run_plan(
        hosts,
        random_plan(seed, 30, [0, 1, 5, 40, 300, 3000], halves=[False, True]),
        lambda: be_slow(algorithms().region, seed),
    )


@pytest.mark.parametrize("hosts", LAYOUTS[:4], ids=str)
def test_some_units_are_under_way_and_end_in_order(hosts):
    """Unit n has the memory of unit n - UNITS_AHEAD, which must have ended; told by `watch`, with sleeps there."""
    size, under_way = len(hosts), []

    def program():
        world = runtime.current("test").world
        draw = random.Random(world.rank)
        for number, (count, capacity) in enumerate([(100, 8), (5, 9), (64, 8), (1, 1), (1, 1)]):
            begun, ended = [], []

            def watch(unit, phase, begun=begun, ended=ended):
                dawdle(draw, 0.3)
                if phase == PACK:
                    begun.append(unit)
                    under_way.append(len(begun) - len(ended))
                if phase == DONE:
                    ended.append(unit)

            reduce(data("float32", count, world.rank, number), kind, capacity, watch=watch)
            assert begun == ended == list(range(-(-count // capacity)))

    kind = Reduction(Sum, TABLE["float32"], size)
    run_ranks(size, program, hosts=hosts, settings=KNOBS, timeout_s=40)
    assert max(under_way) == UNITS_AHEAD, "one is on the wire while the next is summed"


@pytest.mark.parametrize("name", parted(["float32", "float16", "int64"], lambda name: name == "float16"))
@pytest.mark.parametrize("count", [1, 12, 1000, 5000])
@pytest.mark.parametrize("hosts", LAYOUTS, ids=str)
def test_a_wire_carries_what_one_rank_a_host_would_send(hosts, count, name):
    """2 n (H - 1) / H elements out of each host, but for what chunks are longer than others; inside hosts nothing.

    As many local ranks drive it, in equal shares, as the smallest host has.
    """
    places, messages = len(set(hosts)), []
    options = {"pieces": 3}
    run_plan(hosts, [(name, Sum, count, options)], messages=messages)
    sent, by_rank = Counter(), Counter()
    drivers = min(hosts.count(host) for host in set(hosts))
    local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    for message in messages:
        assert hosts[message.source] != hosts[message.destination], "inside a host memory is shared"
        assert local[message.source] == local[message.destination] < drivers
        sent[hosts[message.source]] += message.nbytes
        by_rank[message.source] += message.nbytes
    if count == 5000:
        assert sorted(by_rank) == [rank for rank in range(len(hosts)) if local[rank] < drivers]
        assert max(by_rank.values()) - min(by_rank.values()) <= 0.05 * max(by_rank.values())
    itemsize = np.dtype(name).itemsize
    both = 2 * itemsize  # there as partial sums, back as finished elements
    assert sum(sent.values()) == (places - 1) * count * both
    chunks = drivers * -(-count * itemsize // SLOT_BYTES)
    for host in set(hosts):
        assert abs(sent[host] - (places - 1) / places * count * both) <= 2 * (places - 1) * chunks * both / 2
