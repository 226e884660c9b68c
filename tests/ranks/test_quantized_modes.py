"""Compression.int8 and .int4 beside other options: stochastic, deterministic, scales, joined ranks, GPUs, the log."""

import logging

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import quantized
from ringreduce.ops import Reduction
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.on_threads import each_rank_of, reduced_over_messages
from tests.support.reference import data

INT8, INT4 = rr.Compression.int8, rr.Compression.int4


@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1]], ids=["two hops", "hierarchical"])
def test_stochastic_rounding_is_right_on_average_and_repeatable(hosts):
    arrays = [data("float32", 1000, rank) for rank in range(3)]
    exact, times = np.mean(arrays, axis=0), 100

    def program():
        mine = arrays[rr.rank()]
        results = [rr.allreduce(mine, compression=INT4.stochastic) for _ in range(times)]
        return np.stack(results), rr.allreduce(mine, compression=INT4)

    first, again = run_ranks(3, program, hosts=hosts), run_ranks(3, program, hosts=hosts)
    for found, _ in (*first, *again):
        np.testing.assert_array_equal(found, first[0][0])
    assert not np.array_equal(first[0][0][0], first[0][0][1]), "each time it draws other numbers"
    errors = [np.abs(each - exact).mean() for each in (first[0][0][0], first[0][1], first[0][0].mean(axis=0))]
    assert errors[2] < errors[0] / 5
    assert errors[2] < errors[1] / 3


def test_each_part_of_a_chunk_draws_other_numbers():
    """Integers of 4 bits are exact, their averages are not: so only sums are rounded, each block a part of its own."""
    arrays = [np.tile(np.float32((np.arange(256) * (1 + rank * rank)) % 15 - 7), 30) for rank in range(3)]
    reduction = Reduction(rr.Average, TABLE["float32"], 3, wire=INT4.stochastic, seed=(1,))
    result, *_ = reduced_over_messages(quantized, arrays, reduction, 130)
    assert len({each.tobytes() for each in result.reshape(30, 256)}) == 30


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_deterministic_bits_do_not_depend_on_what_is_fused(cupy, dtype):
    counts = [700, 3, 0, 256, 5000, 257]

    def program():
        mine = [data(dtype, count, rr.rank()) for count in counts]
        together = rr.grouped_allreduce(mine, compression=INT4)
        on_gpu = rr.grouped_allreduce([cupy.asarray(each) for each in mine], compression=INT4)
        apart = [rr.allreduce(each, compression=INT4) for each in mine]
        return [[each.tobytes() for each in found] for found in (together, [each.get() for each in on_gpu], apart)]

    settings = Settings(deterministic=True, fusion_slot_bytes=8192)
    for together, on_gpu, apart in run_ranks(3, program, hosts=[0, 0, 1], settings=settings):
        assert together == on_gpu == apart


@pytest.mark.parametrize("wire", [INT8, INT8.everywhere], ids=str)
@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 2], [0, 0, 1, 1]], ids=str)
def test_gpu_arrays_go_through_host_memory(cupy, hosts, wire):
    size = len(hosts)
    arrays = [[data("float32", count, rank) for count in (5, 3000, 0, 70)] for rank in range(size)]

    def program():
        mine = [cupy.asarray(each) for each in arrays[rr.rank()]]
        return [each.get() for each in rr.grouped_allreduce(mine, op=rr.Sum, compression=wire)]

    settings = Settings(cuda_slot_bytes=4096, fusion_slot_bytes=2048, shared_slot_bytes=1024, cuda_nccl=False)
    results = run_ranks(size, program, hosts=hosts, settings=settings, timeout_s=60)
    for result in results:
        for found, first, mine in zip(result, results[0], zip(*arrays, strict=True), strict=True):
            np.testing.assert_array_equal(found, first)
            np.testing.assert_allclose(found, np.sum(mine, axis=0), atol=size * 1.5 / 127 + 1e-6)
        exact = np.allclose(result[1], np.sum([each[1] for each in arrays], axis=0), atol=1e-5)
        assert exact == (len(set(hosts)) == 1 and not wire.is_everywhere)


@each_rank_of(3, hosts=[0, 1, 1])
def test_scales_and_joined_ranks():
    mine = data("float32", 3000, rr.rank())
    scaled = rr.allreduce(mine, op=rr.Sum, prescale_factor=0.25, postscale_factor=8.0, compression=INT8)
    everyones = np.stack([data("float32", 3000, rank) for rank in range(3)])
    np.testing.assert_allclose(scaled, 2 * everyones.sum(axis=0), atol=2 * 3 * 1.5 / 127)
    if rr.rank() == 1:
        rr.join()
        return scaled
    live = rr.allreduce(mine, op=rr.Sum, compression=INT8)
    rr.join()
    np.testing.assert_allclose(live, everyones[[0, 2]].sum(axis=0), atol=2 * 1.5 / 127)
    return scaled


@each_rank_of(4, hosts=[0, 0, 1, 1])
def test_predivided_gradients_of_an_optimizer():
    found = []
    optimizer = rr.DistributedOptimizer(found.append, compression=INT4, gradient_predivide_factor=4.0)
    for _ in range(2):
        optimizer({"w": data("float64", 900, rr.rank()).reshape(30, 30), "b": data("float64", 3, rr.rank())})
    exact = np.mean([data("float64", 900, rank) for rank in range(4)], axis=0).reshape(30, 30)
    np.testing.assert_allclose(found[0]["w"], exact, atol=1.5 / 7)
    assert not np.allclose(found[0]["w"], exact, atol=1e-3)
    return found[0]["w"]


def test_short_ones_do_not_travel_with_the_negotiation_where_they_would_be_exact():
    def program():
        mine, channel = data("float32", 50, rr.rank()), rr.ordered()
        reduces = rr.allreduce, channel.allreduce
        return {reduce(mine, compression=INT4, name="loss").tobytes() for reduce in reduces for _ in range(4)}

    assert [len(each) for each in run_ranks(2, program, hosts=[0, 1])] == [1, 1]


@pytest.mark.parametrize("count", [100, 100_000])
def test_channels_of_one_host_encode_where_they_shall(count):
    def program():
        mine, channel = data("float32", count, rr.rank()), rr.ordered()
        plain, near = (channel.allreduce(mine, compression=each) for each in (INT8, INT8.everywhere))
        assert not np.array_equal(plain, near)
        return near.tobytes(), np.abs(near - plain).max() < 1.5 / 127

    results = run_ranks(3, program)
    assert results == [results[0]] * 3
    assert results[0][1]


def test_the_log_says_which_format_moved_what(caplog):
    def program():
        for wire in (INT4, INT4.everywhere):
            rr.allreduce(np.ones(1000, np.float32), compression=wire)

    with caplog.at_level(logging.DEBUG, "ringreduce"):
        run_ranks(3, program, hosts=[0, 0, 1], settings=Settings(log_level="debug"))
    for how in ("hierarchical, Compression.int4", "direct, Compression.int4.everywhere"):
        what = f"allreduce of 1 tensors, 4000 B of float32: {how}, in 1 buckets"
        assert any(what in each.getMessage() for each in caplog.records)
