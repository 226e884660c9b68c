"""Blocks in 8 and 4 bits, by both kinds of kernels, set against a plain definition."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.kernels import quantized
from ringreduce.kernels.quantized import BLOCK, block_bytes, decode, encode, reduce
from tests.support.loops import in_a_loop

pytestmark = pytest.mark.usefixtures("either_kernels")
LARGEST = {8: np.float32(127), 4: np.float32(7)}
TINY, HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
KEYS = st.none() | st.integers(0, 2**32 - 1)
LONG = quantized._TOGETHER * BLOCK  # elements of NumPy's passes
NANS = np.array([-1, 0x7F800001, 0x7FC00000], np.int32).view(np.float32)
SPECIAL = [*NANS, np.inf, -np.inf, 0.0, -0.0, TINY, -TINY / 2, 1e-45, HUGE, -HUGE, 254 * TINY, 1.0, -3.0]


def hashed(number):
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        number = (number ^ number >> shift) * factor % 2**32
    return number


def noise(key, number):
    """One number for each element of a block."""
    hashes = [hashed((hashed((key + number) % 2**32) + k) % 2**32) for k in range(BLOCK // 2)]
    halves = [each % 2**16 for each in hashes] + [each >> 16 for each in hashes]
    return np.float32([(2 * half + 1) / 2**17 - 0.5 for half in halves])


def block_of(bits, elements, key, number):
    """The bytes of one block."""
    if not np.isfinite(elements).all():
        return b"\xc0\x7f" + bytes(block_bytes(bits) - 2)
    scale = max(np.abs(elements).max() / LARGEST[bits], TINY).astype(ml_dtypes.bfloat16)
    scaled = elements * (np.float32(1) / np.float32(scale))
    if key is not None:
        scaled = np.clip(scaled + noise(key, number), -LARGEST[bits], LARGEST[bits])
    integers = [round(float(each)) for each in scaled]
    if bits == 4:
        integers = [low % 16 + high % 16 * 16 for low, high in zip(integers[:128], integers[128:], strict=True)]
    return scale.tobytes() + bytes(each % 256 for each in integers)


def blocks_of(bits, source, key=None):
    """The bytes of all blocks."""
    padded = np.append(source, np.zeros(-len(source) % BLOCK, np.float32)).reshape(-1, BLOCK)
    return b"".join(block_of(bits, elements, key, number) for number, elements in enumerate(padded))


def value_of(bits, blocks):
    """All elements of the bytes of blocks."""
    found = []
    for low in range(0, len(blocks), block_bytes(bits)):
        scale = np.frombuffer(blocks, ml_dtypes.bfloat16, 1, low).astype(np.float32)
        codes = np.frombuffer(blocks, np.int8, block_bytes(bits) - 2, low + 2).astype(int)
        if bits == 4:
            codes = np.append((codes % 16 + 8) % 16 - 8, codes >> 4)
        found.append(codes.astype(np.float32) * scale)
    return np.concatenate(found) if found else np.empty(0, np.float32)


def at(offset, count, dtype):
    """An array that begins `offset` bytes behind an aligned address, and the memory around it."""
    dtype = np.dtype(dtype)
    memory = np.full(count * dtype.itemsize + 64, 0xA5, np.uint8)
    return memory[offset : offset + count * dtype.itemsize].view(dtype), memory


def is_untouched_around(memory, offset, size):
    return (np.delete(memory, np.s_[offset : offset + size]) == 0xA5).all()


def encoded(bits, source, key=None, offset=0):
    blocks, memory = at(offset, -(-len(source) // BLOCK), f"V{block_bytes(bits)}")
    encode(bits, source, blocks, key)
    assert is_untouched_around(memory, offset, blocks.nbytes)
    return blocks


@st.composite
def sources(draw, count=None):
    """Elements of many magnitudes, some of them special, at any address."""
    count = draw(st.integers(0, 3 * BLOCK + 1)) if count is None else count
    random, spread = np.random.default_rng(draw(st.integers(0, 999))), draw(st.integers(0, 80))
    with np.errstate(over="ignore"):
        values = random.standard_normal(count) * 10.0 ** random.integers(draw(st.integers(-44, 38)) - spread, 39, count)
        source, _ = at(draw(st.integers(0, 63)), count, np.float32)
        np.clip(values, -HUGE, HUGE, out=source, casting="unsafe")
    for place, special in draw(
        st.dictionaries(st.integers(0, 3 * BLOCK), st.sampled_from(SPECIAL), max_size=3)
    ).items():
        source[place % max(1, count) :][:1] = special
    return source


@pytest.mark.parametrize("bits", [8, 4])
@given(sources(), KEYS, st.integers(0, 63))
def test_blocks_have_the_bytes_and_the_values_of_the_definition(bits, source, key, offset):
    blocks = encoded(bits, source, key, offset)
    assert blocks.tobytes() == blocks_of(bits, source, key)
    target, memory = at(offset, len(source), np.float32)
    decode(bits, blocks, target)
    assert is_untouched_around(memory, offset, target.nbytes)
    np.testing.assert_array_equal(target, value_of(bits, blocks.tobytes())[: len(source)])


@pytest.mark.parametrize("bits", [8, 4])
@given(st.data(), st.integers(1, 5), st.sampled_from([1, 2, 3]), st.sampled_from([1.0, 0.3]), KEYS)
def test_parts_are_summed_in_order_in_float32_and_encoded_once(bits, data, ranks, divisor, postscale, key):
    count = data.draw(st.integers(0, 3)) * BLOCK
    parts = [encoded(bits, data.draw(sources(count)), None, rank) for rank in range(ranks)]
    with np.errstate(all="ignore"):
        total, *others = (value_of(bits, part.tobytes()) for part in parts)
        for other in others:
            total = total + other
        expected = blocks_of(bits, total / np.float32(divisor) * np.float32(postscale), key)
    replaced = data.draw(st.integers(0, ranks))
    out = parts[replaced] if replaced < ranks else np.empty_like(parts[0])
    reduce(bits, parts, out, divisor, postscale, key)
    assert out.tobytes() == expected


@in_a_loop("bits", [8, 4])
@in_a_loop("key", [None, 2**32 - 1])
@in_a_loop("count", [LONG - 1, 2 * LONG + BLOCK + 3])
def test_many_blocks_are_as_few(bits, key, count):
    """NumPy takes some at a time; a block depends on its elements and on key + its number."""
    source = np.random.default_rng(bits).standard_normal(count).astype(np.float32)
    blocks, few = encoded(bits, source, key), LONG - BLOCK
    first = encoded(bits, source[:few], key)
    rest = encoded(bits, source[few:], key and (key + few // BLOCK) % 2**32)
    assert blocks.tobytes() == first.tobytes() + rest.tobytes()
    target = np.empty(count, np.float32)
    decode(bits, blocks, target)
    np.testing.assert_array_equal(target, value_of(bits, blocks.tobytes())[:count])
    out = np.empty_like(blocks)
    reduce(bits, [blocks, blocks], out, 2, 1.0, key)
    whole = np.append(target, np.zeros(-count % BLOCK, np.float32))
    assert out.tobytes() == encoded(bits, whole, key).tobytes()


@in_a_loop("bits", [8, 4])
@in_a_loop("largest", [0.0, 1e-45, TINY, 127 * TINY, 1e-3, 1.0, 1e30, HUGE])
@in_a_loop("key", [None, 7])
def test_an_element_is_wrong_by_half_a_scale_at_most(bits, largest, key):
    source = (np.linspace(-1, 1, BLOCK) * largest).astype(np.float32)
    target = np.empty_like(source)
    decode(bits, encoded(bits, source, key), target)
    scale = max(largest / LARGEST[bits] * 1.004, TINY)
    assert np.abs(target.astype(float) - source).max() <= scale * (0.501 if key is None else 1)


def test_rounded_stochastically_elements_are_right_on_average():
    source = np.linspace(-7, 7, BLOCK).astype(np.float32)
    found = np.empty((1000, BLOCK), np.float32)
    for key, target in enumerate(found):
        decode(4, encoded(4, source, 1_000_003 * key), target)
    deviation = (found.astype(float).mean(axis=0) - source) / (0.5 / np.sqrt(len(found)))
    assert np.abs(deviation).max() < 4.5
