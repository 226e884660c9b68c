"""All-reduces whose elements travel in 8 or 4 bits, on threads: errors, bits, bytes on the wire, what is refused."""

import logging

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import quantized
from ringreduce.collectives.ops import Reduction
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of, known, reduced_over_messages
from tests.support.reference import FLOATS, data
from tests.support.tiers import parted

INT8, INT4 = rr.Compression.int8, rr.Compression.int4
SMALL = Settings(fusion_slot_bytes=4096, shared_slot_bytes=4096, fusion_buffer_bytes=1 << 20)
WORLDS = {
    "two hosts": ([0, 1], INT8),
    "four hosts": ([0, 1, 2, 3], INT4),
    "hosts of two": ([0, 0, 1, 1], INT4),
    "uneven hosts": ([0, 1, 0, 2, 0], INT8),
    "one host": ([0, 0, 0], INT8.everywhere),
    "everywhere": ([0, 0, 1, 1], INT4.stochastic.everywhere),
}
COUNTS = [1, 255, 256, 257, 5, 0, 3000, 20000]


def error(mine, arrays):
    """The largest one of an average, in magnitudes: no element of `data` is above 1.5."""
    return np.abs(mine - np.mean([each.astype(np.float64) for each in arrays], axis=0)).max(initial=0) / 1.5


@pytest.mark.parametrize("settings", parted([Settings(), SMALL], lambda each: each is SMALL), ids=["long", "short"])
@pytest.mark.parametrize("dtype", parted(FLOATS, lambda dtype: dtype in ("float32", "bfloat16")))
@pytest.mark.parametrize("world", WORLDS)
def test_errors_and_the_same_bits_on_all_ranks(world, dtype, settings):
    hosts, wire = WORLDS[world]
    everyones = [[data(dtype, count, rank) for rank in range(len(hosts))] for count in COUNTS]

    def program():
        mine = [arrays[rr.rank()] for arrays in everyones]
        alone = [rr.allreduce(each.reshape(1, -1), compression=wire)[0] for each in mine]
        return alone, rr.grouped_allreduce(mine, compression=wire, op=rr.Sum)

    results = run_ranks(len(hosts), program, hosts=hosts, settings=settings)
    most = (2 if wire.is_stochastic else 1) / (127 if wire.bits == 8 else 7) + 2**-7
    for form, size in ((0, 1), (1, len(hosts))):
        for k, arrays in enumerate(everyones):
            first = results[0][form][k]
            assert (first.shape, first.dtype) == (arrays[0].shape, arrays[0].dtype)
            assert all(each[form][k].tobytes() == first.tobytes() for each in results)
            assert error(first.astype(np.float64) / size, arrays) <= most
    assert error(results[0][0][-1], everyones[-1]) > most / 8, "it was encoded"


@pytest.mark.parametrize("hosts", [[0, 1], [0, 1, 2, 3], [0, 0, 1, 1, 1], list(range(8))], ids=str)
def test_bytes_between_hosts(hosts):
    arrays = [data("float32", 100_003, rank) for rank in range(len(hosts))]

    def nbytes(**options):
        messages = []
        run_ranks(len(hosts), lambda: rr.allreduce(arrays[rr.rank()], **options), hosts=hosts, messages=messages)
        return sum(each.nbytes for each in messages if hosts[each.source] != hosts[each.destination])

    whole = nbytes()
    assert 0.25 * whole < nbytes(compression=INT8) <= 0.26 * whole
    assert 0.125 * whole < nbytes(compression=INT4) <= 0.135 * whole


@each_rank_of(4, hosts=[0, 0, 1, 1], process_sets=[[0, 1], [2, 3], [0], [1], [2], [3]])
def test_inside_a_host_nothing_is_encoded():
    first, mine = rr.rank() // 2 * 2, data("float32", 1000, rr.rank())
    own, alone = known([first, first + 1], 1 + rr.rank() // 2), known([rr.rank()], 3 + rr.rank())
    formats = rr.Compression.none, INT8, INT8.everywhere
    plain, far, near = (rr.allreduce(mine, compression=each, process_set=own) for each in formats)
    np.testing.assert_array_equal(plain, far)
    assert not np.array_equal(plain, near)
    np.testing.assert_array_equal(mine, rr.allreduce(mine, compression=INT8.everywhere, process_set=alone))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each_rank_of(3, hosts=[0, 1, 1])
def test_what_is_not_finite_spoils_its_block_on_all_ranks(bad):
    mine = data("float32", 1000, rr.rank())
    mine[300] = bad if rr.rank() == 2 else 1
    result = rr.allreduce(mine, compression=INT8.everywhere)
    np.testing.assert_array_equal(np.isnan(result), np.arange(1000) // 256 == 1)
    return result


@each_rank_of(2, hosts=[0, 1])
def test_zeros_denormals_and_what_overflows():
    tiny, huge = np.full(300, 1e-40, np.float32), np.full(300, 3e38, np.float32)
    assert not rr.allreduce(np.zeros(300), compression=INT4).any()
    assert np.abs(rr.allreduce(tiny, compression=INT4)).max() < 1e-38
    assert np.isnan(rr.allreduce(huge, op=rr.Sum, compression=INT4)).all(), "the sum is infinite"
    assert np.isnan(rr.allreduce(np.full(300, 1e300), compression=INT4)).all(), "float32 cannot hold it"


@pytest.mark.parametrize("hosts", [None, [0, 1, 1]], ids=["one host", "two hosts"])
def test_ranks_that_pass_another_format_are_named(hosts):
    def program():
        wire, mine = (INT4.stochastic if rr.rank() == 1 else INT8), np.zeros(1000)
        channel = rr.ordered()
        for reduce in (rr.allreduce, channel.allreduce):
            text = r"compression=Compression\.int4\.stochastic, but rank 0 has compression=Compression\.int8 "
            with pytest.raises(rr.MismatchError, match=text):
                reduce(mine, compression=wire)
        with pytest.raises(rr.MismatchError, match=r"compression=None, but rank 0 has compression=Compression\.int8"):
            rr.allreduce(mine, compression=INT8 if rr.rank() == 0 else rr.Compression.none)
        return channel.allreduce(mine, compression=INT8).tolist()

    assert run_ranks(3, program, hosts=hosts) == [[0.0] * 1000] * 3


REFUSED = {
    "an op": (lambda x: rr.allreduce(x, op=rr.Max, compression=INT8), "op=Max with compression=Compression.int8; exp"),
    "Adasum": (
        lambda x: rr.allreduce(x, op=rr.Adasum, compression=INT8),
        "op=Adasum with compression=Compression.int8",
    ),
    "a scatter": (lambda x: rr.reducescatter(x, compression=INT8), "reducescatter: op=Average with compression=Compr"),
    "integers": (
        lambda x: rr.allreduce(x.astype(int), compression=INT4),
        "int64 elements cannot travel as Compression.int4",
    ),
    "complex": (lambda x: rr.allreduce(x * 1j, compression=INT4), "complex128 elements cannot travel as"),
    "bool": (lambda x: rr.allreduce(x > 0, op=rr.Sum, compression=INT4), "bool elements cannot travel as"),
    "a name": (lambda x: rr.allreduce(x, compression="int8"), "compression='int8'; expected Compression.none, .fp16, "),
    "8 bits": (lambda _: INT8.stochastic, "Compression.int8.stochastic: only 4 bits are rounded stochastically"),
    "in order": (
        lambda x: rr.allreduce(x, compression=INT4.stochastic),
        "int4.stochastic with RINGREDUCE_DETERMINISTIC",
    ),
}


@in_a_loop("what", REFUSED)
def test_what_cannot_be_encoded_is_refused(what):
    call, message = REFUSED[what]

    def program():
        with pytest.raises(rr.InputError, match=message):
            call(np.ones(300))
        return rr.allreduce(np.zeros(300), compression=INT8)[0]

    assert run_ranks(2, program, hosts=[0, 1], settings=Settings(deterministic=what == "in order")) == [0.0, 0.0]


# Beside other options: stochastic, deterministic, scales, joined ranks, GPUs, the log


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


def test_the_log_says_which_format_moved_what(heard):
    def program():
        for wire in (INT4, INT4.everywhere):
            rr.allreduce(np.ones(1000, np.float32), compression=wire)

    with heard.at_level(logging.DEBUG, "ringreduce"):
        run_ranks(3, program, hosts=[0, 0, 1], settings=Settings(log_level="debug"))
    for how in ("hierarchical, Compression.int4", "direct, Compression.int4.everywhere"):
        what = f"allreduce of 1 tensors, 4000 B of float32: {how}, in 1 buckets"
        assert any(what in each.getMessage() for each in heard.records)
