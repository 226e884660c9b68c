"""RINGREDUCE_DETERMINISTIC on threads: the same bits, whatever travels together, by whatever way, in whatever order."""

import random
import time

import pytest

import ringreduce as rr
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import known
from tests.support.reference import OPS, assert_reduced, data, folded, readable
from tests.support.tiers import parted

COUNTS = [0, 1, 2, 7, 64, 65, 333, 1000, 4097]
WAYS = {
    "one host": ([0, 0, 0], {}),
    "three hosts": ([0, 1, 2], {}),
    "two hosts": ([0, 0, 1], {}),
    "one host, tiny slots": (
        [0, 0, 0],
        {"shared_slot_bytes": 192, "fusion_slot_bytes": 512, "fusion_buffer_bytes": 1 << 16},
    ),
    "two hosts, tiny slots": ([0, 1, 0], {"fusion_slot_bytes": 1000, "shared_slot_bytes": 64}),
    "three hosts, tiny segments": ([2, 0, 1], {"ring_segment_bytes": 100, "fusion_slot_bytes": 4000}),
    "one host, by messages": ([0, 0, 0], {"algorithm": "direct"}),
    "at once": ([0, 0, 0], {"cycle_time_ms": 0.0}),
    "without a cache": ([0, 1, 1], {"cache_capacity": 0}),
}


def everyones(dtype):
    return [[data(dtype, count, rank, k) for k, count in enumerate(COUNTS)] for rank in range(3)]


def outcome(way, dtype, op, seed=0, **factors):
    """What each rank gets of its tensors, handed in in an order and at times of its own, in groups and alone."""
    hosts, changes = WAYS[way]
    arrays = everyones(dtype)

    def program():
        draw = random.Random(f"{way} {seed} {rr.rank()}")
        mine = arrays[rr.rank()]
        order = list(range(len(COUNTS)))
        draw.shuffle(order)
        handles = {}
        for k in order:
            if draw.random() < 0.2:
                time.sleep(0.003)
            handles[k] = rr.allreduce_async(mine[k], name=f"w{k}", op=op, **factors)
        apart = [rr.synchronize(handles[k]) for k in range(len(COUNTS))]
        grouped = rr.grouped_allreduce(mine, op=op, **factors)
        backwards = rr.grouped_allreduce([array.copy() for array in mine[::-1]], op=op, **factors)[::-1]
        alone = [rr.allreduce_(array.copy(), op=op, **factors) for array in mine]
        return [apart, grouped, backwards, alone]

    return run_ranks(3, program, hosts=hosts, settings=Settings(deterministic=True, **changes))


@pytest.mark.parametrize("op", parted(OPS, lambda op: op in (rr.Average, rr.Product)), **readable)
@pytest.mark.parametrize("dtype", parted(["float32", "float16", "bfloat16"], lambda dtype: dtype != "float16"))
@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_a_sum_in_the_order_of_the_ranks(way, dtype, op):
    expected = [folded(op, list(arrays)) for arrays in zip(*everyones(dtype), strict=True)]
    for forms in outcome(way, dtype, op, seed=op.value):
        for results in forms:
            for result, bits in zip(results, expected, strict=True):
                assert result.tobytes() == bits.tobytes()


@pytest.mark.parametrize("dtype", parted(["float64", "complex64"], lambda dtype: dtype == "complex64"))
def test_other_types_have_the_same_bits_by_every_algorithm(dtype):
    outcomes = [outcome(way, dtype, rr.Average) for way in WAYS]
    first = outcomes[0][0][0]
    assert_reduced(first[-1], rr.Average, [arrays[-1] for arrays in everyones(dtype)])
    for result in (each for ranks in outcomes for forms in ranks for each in forms):
        assert [array.tobytes() for array in result] == [array.tobytes() for array in first]


@pytest.mark.parametrize("way", ["one host", "two hosts", "three hosts, tiny segments"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_factors_are_multiplied_in_their_turn(way, dtype):
    factors = {"prescale_factor": 0.7, "postscale_factor": 1.3}
    expected = [folded(rr.Average, list(each), 0.7, 1.3) for each in zip(*everyones(dtype), strict=True)]
    for forms in outcome(way, dtype, rr.Average, **factors):
        for results in forms:
            for result, bits in zip(results, expected, strict=True):
                assert result.tobytes() == bits.tobytes()


def test_without_it_the_bits_depend_on_the_algorithm():
    """Else this file would test nothing."""
    arrays = everyones("float32")

    def program():
        return rr.allreduce(arrays[rr.rank()][-1], op=rr.Sum).tobytes()

    ways = [Settings(algorithm="ring"), Settings(algorithm="doubling"), Settings(deterministic=True)]
    seen = [run_ranks(3, program, hosts=[0, 1, 2], settings=settings)[0] for settings in ways]
    assert len(set(seen)) > 1


@pytest.mark.parametrize("hosts", [[0] * 5, [0, 1, 0, 1, 2], [0, 1, 2, 3, 4]], ids=str)
def test_a_process_set_sums_in_the_order_of_its_ranks(hosts):
    members = [1, 2, 4]
    arrays = {rank: data("float32", 3001, rank) for rank in members}
    expected = folded(rr.Sum, [arrays[rank] for rank in members])

    def program():
        if rr.rank() not in members:
            return None
        return rr.allreduce(arrays[rr.rank()], op=rr.Sum, process_set=known(members, 1)).tobytes()

    results = run_ranks(5, program, hosts=hosts, settings=Settings(deterministic=True), process_sets=[members])
    assert [results[rank] for rank in members] == [expected.tobytes()] * 3


def test_a_joined_rank_changes_no_bit():
    arrays = [data("float32", 3001, rank) for rank in range(3)]

    def program():
        if rr.rank() == 1:
            return rr.join()
        result = rr.allreduce(arrays[rr.rank()], op=rr.Sum)
        rr.join()
        return result.tobytes()

    for hosts in ([0, 0, 0], [0, 1, 2]):
        results = run_ranks(3, program, hosts=hosts, settings=Settings(deterministic=True))
        assert results[0] == results[2] == folded(rr.Sum, [arrays[0], arrays[2]]).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gpu_arrays_have_the_same_bits(cupy, dtype):
    arrays = everyones(dtype)
    expected = [folded(rr.Sum, list(each)) for each in zip(*arrays, strict=True)]

    def program():
        mine = [cupy.asarray(array.copy()) for array in arrays[rr.rank()]]
        return [result.get() for result in rr.grouped_allreduce(mine, op=rr.Sum)]

    for hosts in ([0, 0, 0], [0, 1, 2]):
        for results in run_ranks(3, program, hosts=hosts, settings=Settings(deterministic=True)):
            for result, bits in zip(results, expected, strict=True):
                assert result.tobytes() == bits.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reducescatter_and_adasum_have_the_same_bits_by_every_algorithm(dtype):
    arrays = everyones(dtype)
    outcomes = []
    for way in WAYS:
        hosts, changes = WAYS[way]

        def program():
            parts = [rr.reducescatter(array, op=rr.Sum).tobytes() for array in arrays[rr.rank()]]
            if dtype == "float32":
                pair = known([0, 2], 1)
                if rr.rank() != 1:
                    parts += [
                        rr.allreduce(each, op=rr.Adasum, process_set=pair).tobytes() for each in arrays[rr.rank()]
                    ]
            return parts

        outcomes.append(
            run_ranks(3, program, hosts=hosts, settings=Settings(deterministic=True, **changes), process_sets=[[0, 2]])
        )
    assert all(each == outcomes[0] for each in outcomes)
    for k, given in enumerate(zip(*arrays, strict=True)):
        assert b"".join(each[k] for each in outcomes[0]) == folded(rr.Sum, list(given)).tobytes(), "in rank order"
