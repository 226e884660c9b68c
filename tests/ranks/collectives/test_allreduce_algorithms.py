"""What every all-reduce algorithm gives, over messages and shared memory: sizes, counts, types, operations, factors.

What is an algorithm's own, its messages and its order of sums, is tested in test_messages.py, or the file of its name.
"""

import itertools

import numpy as np
import pytest

from ringreduce import runtime
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import direct, doubling, halving, hierarchical, ring, shared
from ringreduce.collectives.ops import Average, Reduction, Sum
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support import slots
from tests.support.on_threads import reduced_over_messages, transport
from tests.support.reference import MATRIX, all_but_few_extended, assert_reduced, data, numpy_dtype, readable
from tests.support.tiers import parted


def on_one_host(arrays, reduction, piece_bytes, in_place):
    capacity = min(piece_bytes, slots.SLOT_BYTES) // arrays[0].itemsize

    def program(region):
        def run(made):
            complete(shared.allreduce(made, region, reduction))

        return slots.reduced(arrays[region.rank], reduction.element.storage, capacity, 4, in_place, run)

    return slots.on_a_host(len(arrays), program)


def on_two_hosts(arrays, reduction, piece_bytes, in_place):
    capacity, size = piece_bytes // arrays[0].itemsize, len(arrays)

    def program():
        own = runtime.current("test").engine.states[0].algorithms
        own.hierarchy.halved_bytes = 1 << 40 if in_place else 0

        def run(made):
            complete(hierarchical.allreduce(made, own.region, own.hierarchy, reduction, 40))

        return slots.reduced(arrays[transport().rank], reduction.element.storage, capacity, 4, in_place, run)

    hosts = [rank * 2 // size for rank in range(size)]
    settings = Settings(fusion_buffer_bytes=1 << 20, fusion_slot_bytes=4096, shared_slot_bytes=4096)
    return run_ranks(size, program, hosts=hosts, settings=settings, timeout_s=40)


def over_messages(module):
    def reduce(arrays, reduction, piece_bytes, buffered):
        options = [] if module is doubling else [piece_bytes]
        return reduced_over_messages(module, arrays, reduction, *options, buffered=buffered)

    return reduce


ALGORITHMS = {
    "ring": over_messages(ring),
    "direct": over_messages(direct),
    "doubling": over_messages(doubling),
    "halving": over_messages(halving),
    "shared": on_one_host,
    "hierarchical": on_two_hosts,
}
LEAST = {"hierarchical": 3}  # that one of two hosts has several ranks


@pytest.fixture(params=ALGORITHMS)
def reduced_by_all(request):
    """The results of all ranks, which have the same bits."""

    def reduce(arrays, reduction, piece_bytes=1 << 20, other=False):
        results = ALGORITHMS[request.param](arrays, reduction, piece_bytes, other)
        assert all(result.tobytes() == results[0].tobytes() for result in results), "the same bits on every rank"
        return results

    reduce.least = LEAST.get(request.param, 1)
    return reduce


@pytest.mark.parametrize(
    ("size", "piece_bytes"),
    parted(
        itertools.product([*range(1, 10), 13], [64, 4096, 1 << 20]),
        lambda size, nbytes: (size, nbytes) in ((2, 1 << 20), (3, 64), (4, 1 << 20), (7, 64)),
    ),
)
def test_every_count(reduced_by_all, size, piece_bytes):
    for count in sorted({0, 1, size - 1, size, size + 1, 1000, 10007}):
        if size >= reduced_by_all.least and (count <= 1000 or piece_bytes > 64):
            arrays = [data("float64", count, rank) for rank in range(size)]
            kind = Reduction(Sum, TABLE["float64"], size)
            assert_reduced(reduced_by_all(arrays, kind, piece_bytes, count % 2 == 0)[0], Sum, arrays)


@pytest.mark.parametrize(("name", "op"), all_but_few_extended(MATRIX), **readable)
def test_every_type_and_op(reduced_by_all, name, op):
    for size, count in ((1, 7), (2, 9), (3, 10), (4, 101), (7, 23)):
        if size >= reduced_by_all.least:
            arrays = [data(name, count, rank) for rank in range(size)]
            results = reduced_by_all(arrays, Reduction(op, TABLE[name], size), 64, size % 2 == 0)
            assert_reduced(results[0], op, arrays)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_floats_are_rounded_once(reduced_by_all, name):
    """1 + e + e + 0, where e is half of the distance to the next number: rounded twice, it would stay 1."""
    half = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[name]
    for values in ((1.0, half, half), (1.0, half, half, 0.0)):
        arrays = [np.full(5, value, numpy_dtype(name)) for value in values]
        for piece_bytes in (4, 1 << 20):
            result = reduced_by_all(arrays, Reduction(Sum, TABLE[name], len(values)), piece_bytes)[0]
            np.testing.assert_array_equal(result.astype(np.float64), 1 + 2 * half)


@pytest.mark.parametrize("name", ["int32", "float16", "float32"])
def test_factors_come_before_and_after(reduced_by_all, name):
    arrays = [data(name, 101, rank) for rank in range(3)]
    whole = np.trunc if name == "int32" else lambda array: array
    total = sum(whole(each.astype(np.float64) * 2.5) for each in arrays)
    expected = whole(whole(total / 3) * 2.0)
    for piece_bytes in (40, 1 << 20):
        result = reduced_by_all(arrays, Reduction(Average, TABLE[name], 3, 2.5, 2.0), piece_bytes)[0]
        np.testing.assert_allclose(result.astype(np.float64), expected, rtol=1e-3, atol=1e-6)


def test_all_ranks_get_the_same_nan(reduced_by_all):
    """Which NaN comes out of two is told by their order: partners must not have different ones."""
    payloads = [np.full(100, 0x7FC00000 + 16 * rank, np.uint32).view(np.float32) for rank in range(6)]
    for piece_bytes in (40, 1 << 20):
        results = reduced_by_all(payloads, Reduction(Sum, TABLE["float32"], 6), piece_bytes)
        assert np.isnan(results[0]).all()
