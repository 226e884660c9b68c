import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.dtypes import TABLE
from ringreduce.errors import InputError
from ringreduce.ops import Average, Max, Min, Product, Reduction, Sum, divide, scale


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(1, 1000))
def test_integers_are_divided_exactly_and_truncated_toward_zero(values, divisor):
    flat = np.array(values, np.int64)
    divide(flat, divisor)
    assert flat.tolist() == [abs(value) // divisor * (1 if value >= 0 else -1) for value in values]


def test_unsigned_integers_above_the_signed_range_are_divided_exactly():
    flat = np.array([2**64 - 1, 7, 0], np.uint64)
    divide(flat, 2)
    assert flat.tolist() == [2**63 - 1, 3, 0]


def test_floats_are_divided():
    flat = np.float32([1, -2])
    divide(flat, 4)
    assert flat.tolist() == [0.25, -0.5]


def test_scaled_integers_are_truncated_toward_zero():
    flat = np.array([7, -7, 3], np.int32)
    scale(flat, 0.5)
    assert flat.tolist() == [3, -3, 1]


def test_scaling_keeps_the_type_of_floats():
    flat = np.float32([2, 3])
    scale(flat, 0.1)
    assert flat.dtype == np.float32
    np.testing.assert_array_equal(flat, np.float32([2, 3]) * np.float32(0.1))


@pytest.mark.parametrize("arguments", [(Average, 1.0, 1.0), (Sum, 2.0, 1.0), (Max, 1.0, 0.5)])
def test_bool_is_neither_averaged_nor_scaled(arguments):
    op, prescale, postscale = arguments
    with pytest.raises(InputError, match="bool elements cannot be averaged or scaled; use op=Sum or Max"):
        Reduction(op, TABLE["bool"], 2, prescale, postscale).check()


@pytest.mark.parametrize("op", [Min, Max])
def test_complex_has_no_order(op):
    with pytest.raises(InputError, match=f"complex64 elements have no order: op={op!r} is not defined for them"):
        Reduction(op, TABLE["complex64"], 2).check()


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32"])
def test_an_average_of_narrow_integers_does_not_overflow(name):
    reduction = Reduction(Average, TABLE[name], 3)
    top = np.iinfo(name).max
    values = np.array([top, top - 1], name)
    flat = values.copy()
    partial = reduction.start(flat)
    for _ in range(2):
        reduction.combine(partial, values.astype(partial.dtype))
    reduction.finish(partial, flat)
    assert flat.tolist() == [top, top - 1]


@pytest.mark.parametrize("name", ["float32", "float64", "int64", "complex64", "bool"])
def test_wide_types_are_reduced_in_the_callers_memory(name):
    flat = np.zeros(4, TABLE[name].storage)
    assert Reduction(Product, TABLE[name], 2).start(flat) is flat


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_floats_are_reduced_in_float32_elsewhere(name):
    flat = np.zeros(4, TABLE[name].storage)
    partial = Reduction(Sum, TABLE[name], 2).start(flat)
    assert partial.dtype == np.float32
    assert not np.shares_memory(partial, flat)
