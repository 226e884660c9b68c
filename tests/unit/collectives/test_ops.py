import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives import ops
from ringreduce.collectives.ops import Average, Max, Min, Product, ReduceOp, Reduction, Sum, divide
from ringreduce.errors import InputError
from tests.support.loops import in_a_loop
from tests.support.reference import MATRIX, assert_same_bits, folded, numpy_dtype

pytestmark = pytest.mark.usefixtures("either_kernels")
BLOCK = ops.BLOCK_BYTES // 4
"""Elements that `reduce_parts` takes at a time, of the 4-byte types."""


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(1, 1000))
def test_integers_are_divided_exactly_and_truncated_toward_zero(values, divisor):
    flat = np.array(values, np.int64)
    divide(flat, divisor)
    assert flat.tolist() == [abs(value) // divisor * (1 if value >= 0 else -1) for value in values]


@in_a_loop("name", ["int64", "uint64"])
@in_a_loop("size", [1, 2, 3, 7, 64, 1000])
def test_means_of_64_bit_integers_are_exact_where_their_sums_need_more_bits(name, size):
    """In one look at all, in partial results of some, and added one by one."""
    count, limits = 50, np.iinfo(name)
    parts = raw_parts(name, size, count)
    for number, part in enumerate(parts):
        part[:5] = (
            limits.min,
            limits.max,
            limits.max - number,
            limits.min + number,
            limits.max if number else limits.min,
        )
    sums = [sum(column) for column in zip(*(each.tolist() for each in parts), strict=True)]
    expected = [abs(each) // size * (-1 if each < 0 else 1) for each in sums]
    reduction, out = Reduction(Average, TABLE[name], size), np.empty(count, name)
    reduction.reduce_parts(parts, out)
    assert out.tolist() == expected
    partials = np.empty((2, count), reduction.sum_type)
    if size > 1:
        reduction.part().reduce_parts(parts[:1], partials[0])
        reduction.part().reduce_parts(parts[1:], partials[1])
        reduction.combine(*partials)
        reduction.finish(partials[0], out)
        assert out.tolist() == expected
    partial = reduction.start(parts[0].copy())
    reduction.combine(partial, *[reduction.start(each.copy()) for each in parts[1:]])
    reduction.finish(partial, out := partial if reduction.in_place else out)
    assert out.tolist() == expected


@pytest.mark.parametrize("factors", [(0.5, 1.0), (1.0, 3.0), (-2.0, 0.25)])
def test_means_of_64_bit_integers_are_scaled_as_those_of_shorter_ones(factors):
    parts = [np.array([10, -7, 100]), np.array([1, 2, 3]), np.array([5, 5, -51])]
    found = [np.empty(3, name) for name in ("int64", "int32")]
    for out in found:
        Reduction(Average, TABLE[out.dtype.name], 3, *factors).reduce_parts(
            [each.astype(out.dtype) for each in parts], out
        )
    assert found[0].tolist() == found[1].tolist()


@pytest.mark.parametrize("arguments", [(Average, 1.0, 1.0), (Sum, 2.0, 1.0), (Max, 1.0, 0.5)])
def test_bool_is_neither_averaged_nor_scaled(arguments):
    op, prescale, postscale = arguments
    with pytest.raises(InputError, match="bool elements cannot be averaged or scaled; use op=Sum or Max"):
        Reduction(op, TABLE["bool"], 2, prescale, postscale).check()


@pytest.mark.parametrize("op", [Min, Max])
def test_complex_has_no_order(op):
    with pytest.raises(InputError, match=f"complex64 elements have no order: op={op!r} is not defined for them"):
        Reduction(op, TABLE["complex64"], 2).check()


@in_a_loop("name", ["float16", "bfloat16", "float32", "float64", "int64", "complex64", "bool"])
@in_a_loop("op", [Sum, Product])
def test_16_bit_floats_are_reduced_in_float32_elsewhere_and_others_in_the_callers_memory(name, op):
    flat = np.zeros(4, TABLE[name].storage)
    partial = Reduction(op, TABLE[name], 2).start(flat)
    is_elsewhere = partial.dtype == np.float32 and not np.shares_memory(partial, flat)
    assert is_elsewhere if TABLE[name].is_half else partial is flat


def raw_parts(name, size, count, seed=0):
    """Elements that differ by rank and index, large ones, subnormals, infinities and NaN among the floats."""
    return [each.copy() for each in drawn(name, size, count, seed)]


@functools.cache  # which takes longer than what is tested with them
def drawn(name, size, count, seed):
    random = np.random.default_rng([seed, size, count])
    kind, storage = TABLE[name].kind, TABLE[name].storage
    if kind == "b":
        return [random.random(count) < 0.5 for _ in range(size)]
    if kind in "iu":
        limits = np.iinfo(storage)
        return [random.integers(limits.min, limits.max, count, storage, endpoint=True) for _ in range(size)]
    if name in ("float16", "bfloat16"):  # any bits
        return [random.integers(0, 2**16, count, np.uint16).view(storage) for _ in range(size)]
    with np.errstate(over="ignore"):
        parts = [(random.standard_normal(count) * 10.0 ** random.integers(-44, 39, count)) for _ in range(size)]
        if kind == "c":
            parts = [part + 1j * part[::-1] for part in parts]
        return [part.astype(storage) for part in parts]


def values(name, flat):
    """The elements of what is stored: a bfloat16's bits are an integer."""
    return flat.view(numpy_dtype(name))


def expected(name, op, parts, *scales):
    return folded(op, [values(name, part) for part in parts], *scales).view(parts[0].dtype)


@in_a_loop(("name", "op"), MATRIX)
def test_parts_are_reduced_in_rank_order_and_rounded_once(name, op):
    for size, count in itertools.product([1, 2, 3, 4], [0, 1, 1000, 2 * BLOCK + 7]):
        print(f"{size} parts of {count} elements")
        parts = raw_parts(name, size, count)
        before = [part.copy() for part in parts]
        out = np.empty(count, TABLE[name].storage)
        Reduction(op, TABLE[name], size).reduce_parts(parts, out)
        assert_same_bits(out, expected(name, op, before), name)
        assert [part.tobytes() for part in parts] == [original.tobytes() for original in before]


BITWISE = [(n, op) for n in TABLE for op in ReduceOp if op.value.startswith("Bitwise") and TABLE[n].kind in "biu"]


@in_a_loop(("name", "op"), MATRIX + BITWISE)
def test_the_neutral_element_changes_nothing(name, op):
    (part,) = raw_parts(name, 1, 100)
    neutral, found = np.empty_like(part), np.empty_like(part)
    reduction = Reduction(op, TABLE[name], 1)
    reduction.neutral(neutral)
    part[np.isinf(part)] = 2  # its product with 1 + 0j has a NaN, as C says
    for parts in ([part, neutral], [neutral, part]):
        reduction.reduce_parts(parts, found)
        with np.errstate(invalid="ignore"):  # ARM tells of signalling NaNs
            np.testing.assert_array_equal(*[values(name, each).astype(TABLE[name].sum_type) for each in (found, part)])


@in_a_loop("position", [0, 1, 2, 3])
@in_a_loop("name", ["float32", "float16", "bfloat16", "int8", "complex64"])
@in_a_loop("op", [Sum, Average])
def test_the_result_may_replace_any_of_the_parts(name, op, position):
    parts = raw_parts(name, 4, 2 * BLOCK + 7, seed=1)
    reference = expected(name, op, [part.copy() for part in parts])
    Reduction(op, TABLE[name], 4).reduce_parts(parts, parts[position][:])
    assert_same_bits(parts[position], reference, name)


@in_a_loop("scales", [(0.5, 1.0), (1.0, 3.0), (0.3, 0.7)])
@in_a_loop("name", ["float32", "float64", "float16", "bfloat16", "int32", "int64", "complex64"])
@in_a_loop("op", [Sum, Average])
def test_parts_are_scaled_each_and_as_a_whole(name, op, scales):
    parts = [part // 8 for part in raw_parts(name, 3, BLOCK + 5)] if name[0] == "i" else raw_parts(name, 3, BLOCK + 5)
    before = [part.copy() for part in parts]
    out = np.empty(len(parts[0]), TABLE[name].storage)
    Reduction(op, TABLE[name], 3, *scales).reduce_parts(parts, out)
    assert_same_bits(out, expected(name, op, before, *scales), name)
    for part, original in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part, original)


@in_a_loop(("name", "op"), MATRIX)
def test_two_parts_reduced_at_once_have_the_bits_of_the_ring(name, op):
    mine, theirs = raw_parts(name, 2, 999, seed=2)
    reduction = Reduction(op, TABLE[name], 2)
    at_once, step_by_step = np.empty_like(mine), mine.copy()
    reduction.reduce_parts([mine, theirs], at_once)
    partial = reduction.start(step_by_step)
    reduction.combine(partial, reduction.start(theirs.copy()))
    with np.errstate(over="ignore", invalid="ignore"):
        reduction.finish(partial, step_by_step)
    assert_same_bits(at_once, step_by_step, name)


@in_a_loop("name", ["float32", "float16", "bfloat16", "int32", "int64"])
@in_a_loop(
    ("op", "scales"),
    [(Sum, (1.0, 1.0)), (Average, (2.0, 0.5)), (Max, (2.0, 1.0)), (Product, (1.0, 0.25))],
)
@in_a_loop("travels", [False, True])
def test_a_part_of_the_ranks_is_not_divided_and_rounded_only_where_it_travels(name, op, scales, travels):
    element = TABLE[name]
    values = np.arange(500, dtype=element.sum_type) % (3 if op is Product else 19)  # whose results need few bits
    parts = [element.narrow(values + rank) for rank in range(4)]
    exact = Reduction(op, element, 4, *scales)
    whole = exact.on_wire() if travels else exact
    assert whole.sum_type.itemsize == (2 if travels and element.is_half else exact.sum_type.itemsize)
    sums, out = [np.empty(500, whole.sum_type) for _ in range(2)], np.empty(500, element.storage)
    for into, start in zip(sums, (0, 2), strict=True):
        whole.part().reduce_parts(parts[start : start + 2], into)
    whole.combine(*sums)
    whole.finish(sums[0], sums[0] if whole.in_place else out)
    expected = np.empty(500, element.storage)
    exact.reduce_parts(parts, expected)
    assert_same_bits(sums[0] if whole.in_place else out, expected)


@in_a_loop(("name", "op"), [case for case in MATRIX if not case[0].startswith("complex")])
@in_a_loop("size", [2, 3])
def test_a_result_in_two_places_has_the_same_bits(name, op, size):
    for count in (0, 1, 1000, 2 * BLOCK + 7):
        drawn = raw_parts(name, size, count, seed=4)
        reference = expected(name, op, [part.copy() for part in drawn])
        for position in (None, *range(size)):
            print(f"{count} elements, in place of part {position}")
            parts = [part.copy() for part in drawn]
            out = np.empty_like(parts[0]) if position is None else parts[position]
            around = np.zeros(count + 2, out.dtype)
            Reduction(op, TABLE[name], size).reduce_to_two(parts, out, around[1:-1])
            assert_same_bits(out, reference, name)
            assert around[1:-1].tobytes() == out.tobytes()
            assert not around[[0, -1]].any()


@pytest.mark.parametrize("unusual", ["read-only", "unaligned", "strided", "alone"])
def test_unusual_memory(unusual):
    parts = raw_parts("float32", 1 if unusual == "alone" else 2, 1000, seed=5)
    if unusual == "unaligned":
        memory = np.frombuffer(bytearray(b".") + parts[1].tobytes(), np.uint8)
        parts[1] = memory[1:].view(np.float32)
        assert not parts[1].flags.aligned
    if unusual == "strided":
        parts[1] = np.repeat(parts[1], 2)[::2]
    parts[-1].flags.writeable = unusual != "read-only"
    out, copy = np.empty((2, 1000), np.float32)
    Reduction(Average, TABLE["float32"], len(parts), 0.5, 3.0).reduce_to_two(parts, out, copy)
    assert_same_bits(out, expected("float32", Average, parts, 0.5, 3.0), "float32")
    assert copy.tobytes() == out.tobytes()


@given(st.lists(st.floats(width=32), min_size=1), st.integers(0, 20))
def test_dividing_by_a_power_of_two_keeps_the_bits_of_a_division(values, exponent):
    flat = np.float32(values)
    with np.errstate(all="ignore"):
        quotient = flat / np.float32(2**exponent)
        divide(flat, 2**exponent)
    assert_same_bits(flat, quotient, "float32")
