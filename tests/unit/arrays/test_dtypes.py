import ml_dtypes
import numpy as np
import pytest
import torch

from ringreduce.arrays.dtypes import TABLE, _bfloat16_bits, check_reducible, element_type
from ringreduce.errors import UnsupportedArrayError
from tests.support.loops import in_a_loop


def test_the_table_holds_what_the_readme_promises():
    assert set(TABLE) == {
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    }


@in_a_loop("name", TABLE)
def test_dtypes_of_numpy_and_torch_are_told_by_name(name):
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    assert element_type(np.dtype(dtype)).name == name
    assert element_type(getattr(torch, name)).name == name


@pytest.mark.parametrize(
    ("dtype", "name", "storage"),
    [(np.dtype(">f4"), ">f4", "u4"), (np.dtype("U3"), "<U3", "V12"), (torch.float8_e5m2, "float8_e5m2", "u1")],
)
def test_elements_of_other_types_are_bytes(dtype, name, storage):
    element = element_type(dtype)
    assert (element.name, element.kind, element.storage, element.sum_type) == (name, "V", storage, storage)
    with pytest.raises(UnsupportedArrayError, match=f"^here: elements of type {name} can be moved, but not reduced"):
        check_reducible(element, "here: ")


@pytest.mark.parametrize("dtype", [np.dtype("O"), np.dtype([("a", "O")]), np.dtype("S0")])
def test_what_is_of_no_fixed_size_is_refused_by_name(dtype):
    with pytest.raises(UnsupportedArrayError, match=r"elements of type .* have no fixed size; pass numbers, "):
        element_type(dtype)


def test_a_gpu_rounds_to_bfloat16_as_a_processor_does_and_nan_stays_nan():
    bits = np.random.default_rng(1).integers(0, 1 << 32, 10_000, np.uint32)
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    ties = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x80000000], np.uint32)
    values = np.concatenate([bits, nans, ties]).view(np.float32)
    found = _bfloat16_bits(values)
    expected, is_nan = TABLE["bfloat16"].narrow(values), np.isnan(values)
    assert np.isnan(found[is_nan].view(ml_dtypes.bfloat16)).all()
    np.testing.assert_array_equal(found[~is_nan], expected[~is_nan])
