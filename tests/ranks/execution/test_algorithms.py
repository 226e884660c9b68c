"""Every algorithm forced through the engine, on threads: results in every form, and that it is the one asked for."""

import dataclasses
import functools
import itertools
import time
from collections import Counter

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.collectives.cost_model import Constants
from ringreduce.runtime.startup import measure
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support import matrix
from tests.support.on_threads import each_rank_of, known
from tests.support.reference import MATRIX, all_but_one_of_each_extended, assert_reduced, data, readable
from tests.support.tiers import parted

TWO_HOSTS = [0, 0, 1, 1]
FORCED = {
    "shared": [0, 0, 0, 0],
    "hierarchical": TWO_HOSTS,
    "hierarchical, uneven": [0, 1, 0, 0],
    "ring": TWO_HOSTS,
    "direct": TWO_HOSTS,
    "halving": [0, 1, 1],
    "doubling": [0, 1, 1],
}
SOME = ["bool", "int8", "uint64", "int32", "float16", "bfloat16", "float32", "complex128"]
SETS = {1: [2, 0], 2: [0, 1], 3: [1, 3, 2]}
"""Of two hosts, of one host, and one that gets no region, as there are two and it has ranks of both others."""


def forced(kind, **changes):
    """The knobs of the matrix, and one algorithm."""
    return dataclasses.replace(matrix.SMALL, algorithm=kind.partition(",")[0], **changes)


def state(number=0):
    return runtime.current("test").engine.states[number]


@pytest.mark.parametrize(
    ("dtype", "op"),
    all_but_one_of_each_extended([each for each in MATRIX if each[0] in SOME and each[1] is not rr.Max]),
    **readable,
)
@pytest.mark.parametrize("kind", FORCED)
def test_every_form(kind, dtype, op):
    hosts = FORCED[kind]

    def program():
        assert state().algorithms.text() == kind.partition(",")[0]
        return matrix.allreduce_program(dtype, op, list(range(len(hosts))), rr.global_process_set)

    results = run_ranks(len(hosts), program, hosts=hosts, settings=forced(kind))
    assert all(each == results[0] for each in results)


@pytest.mark.parametrize("dtype", parted(["int32", "bfloat16", "float32"], lambda dtype: dtype == "bfloat16"))
@pytest.mark.parametrize("kind", [*FORCED, "auto"])
def test_process_sets_of_one_host_of_two_and_without_shared_memory(kind, dtype):
    """A set in which the forced algorithm cannot be used takes another; all sets work at the same time."""
    hosts = [0, 0, 0, 0] if kind == "shared" else TWO_HOSTS

    def program():
        told = {}
        for number, ranks in SETS.items():
            if rr.rank() in ranks:
                told[number] = matrix.allreduce_program(dtype, rr.Sum, sorted(ranks), known(ranks, number))
        told[0] = matrix.allreduce_program(dtype, rr.Average, [0, 1, 2, 3], rr.global_process_set)
        regions = {number: state(number).algorithms.region is not None for number in told}
        return told, regions, {number: state(number).algorithms.usable for number in told}

    results = run_ranks(4, program, hosts=hosts, settings=forced(kind), process_sets=list(SETS.values()))
    for number, ranks in {0: [0, 1, 2, 3], **SETS}.items():
        for rank in ranks:
            told, regions, usable = results[rank]
            assert told[number] == results[ranks[0]][0][number]
            assert regions[number] == (number in (0, 1)), "two regions, each in one set of every rank"
            assert ("shared" in usable[number]) == (regions[number] and len({hosts[each] for each in ranks}) == 1)


@each_rank_of(4, settings=forced("shared"), process_sets=[[0, 1], [2, 3]])
def test_sets_without_a_common_rank_have_the_same_region_and_both_use_it():
    number = 1 + rr.rank() // 2
    ranks = [2 * number - 2, 2 * number - 1]
    arrays = [data("float32", 5000, rank) for rank in ranks]
    for step in range(20):
        mine = arrays[rr.rank() % 2] * np.float32(step)
        result = rr.allreduce(mine, op=rr.Sum, process_set=known(ranks, number))
        assert_reduced(result, rr.Sum, [array * np.float32(step) for array in arrays])
    assert state(number).algorithms.text() == "shared"


@pytest.mark.parametrize("dtype", parted(["int64", "float16", "float32", "bool"], lambda dtype: dtype == "float16"))
@pytest.mark.parametrize("kind", FORCED)
def test_joined_ranks_give_what_changes_nothing(kind, dtype):
    """Tensors that are cut into slots, of one op after the other."""
    hosts = FORCED[kind]
    size = len(hosts)
    ops = [rr.Max, rr.Min, rr.Sum, rr.Product] + ([rr.Average] if dtype != "bool" else [])
    program = functools.partial(matrix.join_program, dtype, ops, 777)
    assert run_ranks(size, program, hosts=hosts, settings=forced(kind)) == [size - 1] * size


@pytest.mark.parametrize("kind", FORCED)
def test_tensors_of_all_kinds_at_once_in_any_order(kind):
    """Each rank hands everything in before it waits, in an order of its own, and some are late."""
    hosts = FORCED[kind]
    size = len(hosts)
    plan = [
        (dtype, op, count)
        for dtype in ("float32", "float16", "int8")
        for op in (rr.Sum, rr.Average, rr.Max)
        for count in (0, 1, 50, 3000)
    ]
    everyones = [[data(d, n, rank, k) for rank in range(size)] for k, (d, _, n) in enumerate(plan)]

    def program():
        order = np.random.default_rng(rr.rank())
        for _ in range(3):
            handles = {}
            for k in order.permutation(len(plan)).tolist():
                if order.random() < 0.02:
                    time.sleep(0.005)
                handles[k] = rr.allreduce_async(everyones[k][rr.rank()], name=f"w{k}", op=plan[k][1])
            for k, handle in handles.items():
                assert_reduced(rr.synchronize(handle), plan[k][1], everyones[k])

    run_ranks(size, program, hosts=hosts, settings=forced(kind))


PAIRS = {
    "shared": [],
    "hierarchical": [(0, 2), (1, 3), (2, 0), (3, 1)],
    "hierarchical, uneven": [(0, 1), (1, 0)],
    "ring": [(0, 1), (1, 2), (2, 3), (3, 0)],
    "direct": list(itertools.permutations(range(4), 2)),
    "doubling": [(0, 1), (0, 2), (1, 0), (2, 0)],  # ranks 0 and 1 fold, then 0 and 2 swap, then 1 gets the result back
}


@pytest.mark.parametrize("kind", PAIRS)
def test_by_its_messages_one_sees_which_algorithm_it_was(kind):
    messages, hosts = [], FORCED[kind]

    def program():
        return rr.allreduce(np.full(100, rr.rank(), np.float32), op=rr.Sum)[0]

    settings = Settings(algorithm=kind.partition(",")[0])
    total = sum(range(len(hosts)))
    assert run_ranks(len(hosts), program, hosts=hosts, settings=settings, messages=messages) == [total] * len(hosts)
    assert sorted({(each.source, each.destination) for each in messages}) == PAIRS[kind]


@pytest.mark.parametrize("kind", PAIRS)
def test_16_bit_floats_travel_as_16_bits_and_average_to_what_they_hold(kind):
    """Half of float32's bytes on every link; their sum would overflow."""
    hosts = FORCED[kind]

    def sent(dtype, links):
        def program():
            mine = np.full(1200, 6e4 + 64 * rr.rank(), dtype)
            scaled = rr.allreduce(mine, op=rr.Sum, postscale_factor=1 / rr.size())
            return [*rr.allreduce(mine, op=rr.Average).tolist(), *scaled.tolist()]

        messages, settings = [], Settings(algorithm=kind.partition(",")[0])
        results = run_ranks(len(hosts), program, hosts=hosts, settings=settings, messages=messages)
        assert results == [[6e4 + 32 * (len(hosts) - 1)] * 2400] * len(hosts)
        for each in messages:
            links[each.source, each.destination] += each.nbytes
        return links

    assert {link: 2 * nbytes for link, nbytes in sent("float16", Counter()).items()} == sent("float32", Counter())


def test_several_slots_are_under_way_on_channels_of_their_own():
    """Between hosts one slot is on the wire while the next is packed."""
    for kind in ("halving", "ring"):
        messages, settings = [], forced(kind, ring_segment_bytes=4096)
        run_ranks(
            4, lambda: rr.allreduce(np.ones(4000, np.float32)), hosts=TWO_HOSTS, settings=settings, messages=messages
        )
        assert len({each.tag for each in messages}) == 2, kind


# The constants


@pytest.mark.parametrize("hosts", [[0, 0], [0, 0, 0], [0, 1], [0, 0, 1, 1], [0, 1, 1], [0, 1, 0]], ids=str)
def test_the_constants_are_measured_and_the_slowest_rank_s_count(hosts):
    def program():
        current = runtime.current("test")
        slots = [block[-4096:] for block in current.engine.host.window.blocks]
        return complete(measure.figures(current.transport, hosts, slots))

    results = run_ranks(len(hosts), program, hosts=hosts, settings=Settings(cycle_time_ms=0))
    found = measure.slowest(results)
    assert found.message_us in (Constants().message_us, max(each[1] for each in results))
    default = Constants()
    one_host, some_together = len(set(hosts)) == 1, len(set(hosts)) < len(hosts)
    assert found.message_us != default.message_us
    assert (found.wire_us == default.wire_us) == one_host, "what cannot be measured keeps its default"
    assert (found.copy_gbs == default.copy_gbs) != some_together
    assert Constants.parse(str(found)) is not None


@pytest.mark.parametrize("ranks_of_a_host", [2, 16])
def test_the_memory_of_a_rank_does_not_grow_with_the_number_of_ranks(ranks_of_a_host):
    def memory():
        return rr.info().shared_memory_bytes, rr.info().fusion_buffer_bytes

    [few] = set(run_ranks(2, memory))
    hosts = [rank // ranks_of_a_host for rank in range(16)]
    assert set(run_ranks(16, memory, hosts=hosts)) == {few}
    assert min(few) > 0


def test_info_says_how_long_gradients_travel_between_hosts():
    settings = Settings(costs="wire_gbs=0.0125")  # 100 Mbit/s: 150 MB are 12 s
    times = "12 s as fp32, 6 s as fp16, 3.02 s as int8, 1.52 s as int4"
    text = f"100 MB of gradients take {times}, over 0.1 Gbit/s between 4 hosts"
    assert run_ranks(4, lambda: rr.info().wire, hosts=[0, 1, 2, 3], settings=settings) == [text] * 4
    assert run_ranks(2, lambda: rr.info().wire) == [""] * 2


def test_prescribed_constants_change_the_choice():
    far, near = (
        run_ranks(4, lambda: rr.info().algorithm, hosts=[0, 1, 2, 3], settings=Settings(costs=costs))
        for costs in ("wire_us=5000", "wire_us=1,message_us=1")
    )
    assert far != near
