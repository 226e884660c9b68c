"""Both kinds of kernels set against conversions made here, over all bit patterns that matter."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives.ops import Average, Reduction, Sum
from ringreduce.compression import Compression
from ringreduce.kernels import half
from tests.support.loops import in_a_loop
from tests.support.reference import assert_same_bits

NAMES = ("float16", "bfloat16")
VALUE = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STORAGE = {"float16": np.float16, "bfloat16": np.uint16}
EVERY = np.arange(2**16, dtype=np.uint16)
COUNTS = [0, 1, 1000, 4096, half.BLOCK, 2 * half.BLOCK + 7]

pytestmark = pytest.mark.usefixtures("either_kernels")


def value(name, stored):
    """The stored elements in float32, by another's conversion."""
    with np.errstate(invalid="ignore"):  # ARM tells of signalling NaNs
        return np.asarray(stored).view(VALUE[name]).astype(np.float32)


def rounded(name, values):
    """Rounded to 16 bits, by another's conversion."""
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(VALUE[name]).view(STORAGE[name])


def random_elements(name, count, seed=0):
    bits = np.random.default_rng([seed, count]).integers(0, 2**16, count, np.uint16)
    return bits.view(STORAGE[name])


@in_a_loop("name", NAMES)
def test_every_bit_pattern_is_widened_exactly(name):
    stored = EVERY.view(STORAGE[name])
    wide = np.empty(2**16, np.float32)
    half.widen(name, stored, wide)
    assert_same_bits(wide, value(name, stored))


@in_a_loop("name", NAMES)
def test_values_between_all_neighbours_are_rounded_to_nearest_even(name):
    """Each representable value, the midpoint above it, float32's neighbours of both; subnormals and NaN too."""
    step = 1 << (13 if name == "float16" else 16)
    exact = value(name, EVERY.view(STORAGE[name])).view(np.uint32).astype(np.int64)
    near = (exact[:, None] + np.array([-1, 0, 1, step // 2 - 1, step // 2, step // 2 + 1])).ravel()
    with np.errstate(all="ignore"):  # float16's subnormals lie closer together than `step`
        middles = (value(name, EVERY[:-1].view(STORAGE[name])) + value(name, EVERY[1:].view(STORAGE[name]))) / 2
    random = np.random.default_rng(5).integers(0, 2**32, 200_000)
    bits = np.concatenate([near % 2**32, middles.view(np.uint32), middles.view(np.uint32) + np.uint32(1), random])
    values = bits.astype(np.uint32).view(np.float32)
    out = np.empty(len(values), STORAGE[name])
    half.narrow(name, values, out)
    assert_same_bits(out, rounded(name, values), name)


@in_a_loop("wide", [np.float32, np.float64])
@in_a_loop(("name", "compression"), [("float16", Compression.fp16), ("bfloat16", Compression.bf16)])
def test_arrays_of_any_layout_are_compressed_and_come_back(name, compression, wide):
    shape = 3, 5, half.BLOCK // 10
    array = np.random.default_rng(7).standard_normal(shape).astype(wide)
    array *= 10.0 ** np.arange(-12, 3).reshape(3, 5, 1)  # of float16 subnormal ones, too
    array[0, 0, :6] = np.nan, np.inf, -np.inf, 7e4, -0.0, 1e-42
    for layout in (
        array,
        array.T,
        array.transpose(1, 2, 0),
        array[::2, :, ::-1],
        array[0],
        array[1, 1, 1:2],
        array[:0],
    ):
        print(layout.shape, layout.strides)
        sent, context = compression.compress(layout)
        assert (sent.shape, sent.dtype) == (layout.shape, VALUE[name])
        narrowed = rounded(name, layout.astype(np.float32))
        np.testing.assert_array_equal(sent.astype(np.float32), value(name, narrowed))
        back = compression.decompress(sent, context)
        assert back.dtype == wide
        np.testing.assert_array_equal(back, value(name, narrowed))
        assert back.flags.f_contiguous == layout.flags.f_contiguous


@in_a_loop("bits", [0x7F800001, 0x7FBFFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF800001])
@in_a_loop("name", NAMES)
def test_no_nan_becomes_a_number(name, bits):
    out = np.zeros(3, STORAGE[name])
    half.narrow(name, np.full(3, bits, np.uint32).view(np.float32), out)
    assert np.isnan(value(name, out)).all()


@in_a_loop("size", [1, 2, 3, 5])
@in_a_loop("name", NAMES)
def test_parts_are_summed_in_order_in_float32_and_rounded_once(name, size):
    for count, divisor in itertools.product(COUNTS, [1, 2, 3]):
        print(f"{count} elements, divided by {divisor}")
        parts = [random_elements(name, count, seed) for seed in range(size)]
        for part in parts:
            part.flags.writeable = False
        out = np.empty(count, STORAGE[name])
        with np.errstate(all="ignore"):
            total = value(name, parts[0])
            for part in parts[1:]:
                total = total + value(name, part)
            expected = rounded(name, total / np.float32(divisor))
            Reduction(Average, TABLE[name], divisor).reduce_parts(parts, out)
        assert_same_bits(out, expected, name)


@in_a_loop("position", [0, 1, 2])
@in_a_loop("name", NAMES)
def test_the_sum_may_replace_a_part(name, position):
    parts = [random_elements(name, 2 * half.BLOCK + 7, seed) for seed in range(3)]
    with np.errstate(all="ignore"):
        expected = rounded(name, value(name, parts[0]) + value(name, parts[1]) + value(name, parts[2]))
        Reduction(Sum, TABLE[name], 3).reduce_parts(parts, parts[position][:])
    assert_same_bits(parts[position], expected, name)
