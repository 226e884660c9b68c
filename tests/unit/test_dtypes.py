import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.arrays.dtypes import TABLE, element_type
from ringreduce.errors import UnsupportedArrayError


def test_the_table_holds_what_the_readme_promises():
    assert set(TABLE) == {
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    }


@pytest.mark.parametrize("name", TABLE)
def test_dtypes_of_numpy_and_torch_are_told_by_name(name):
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    assert element_type(np.dtype(dtype)).name == name
    assert element_type(getattr(torch, name)).name == name


@pytest.mark.parametrize("dtype", [np.dtype("O"), np.dtype(">f4"), np.dtype("U3"), np.dtype("M8[s]"), torch.qint8])
def test_other_types_are_refused_by_name(dtype):
    with pytest.raises(
        UnsupportedArrayError, match=r"elements of type .* cannot be communicated; supported are: bool, "
    ):
        element_type(dtype)


def bits32(values):
    return np.array(values, np.uint32).view(np.float32)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_bfloat16_is_rounded_as_ml_dtypes_rounds_it(bits):
    values = bits32(bits)
    ours = TABLE["bfloat16"].narrow(values).view(ml_dtypes.bfloat16)
    with np.errstate(all="ignore"):
        theirs = values.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    np.testing.assert_array_equal(ours[~np.isnan(ours)], theirs[~np.isnan(theirs)])


def test_bfloat16_ties_go_to_even():
    ties = bits32([0x3F808000, 0x3F818000, 0xBF808000, 0x3F808001])
    assert TABLE["bfloat16"].narrow(ties).tolist() == [0x3F80, 0x3F82, 0xBF80, 0x3F81]


def test_bfloat16_widens_exactly():
    every_bit_pattern = np.arange(2**16, dtype=np.uint16)
    wide = TABLE["bfloat16"].widen(every_bit_pattern)
    np.testing.assert_array_equal(wide, every_bit_pattern.view(ml_dtypes.bfloat16).astype(np.float32))


def test_float16_rounds_once_and_overflows_to_infinity():
    narrowed = TABLE["float16"].narrow(np.float32([1 + 2**-11, 1 + 2**-11 + 2**-20, 1e6]))
    np.testing.assert_array_equal(narrowed, np.float16([1, 1 + 2**-10, np.inf]))
