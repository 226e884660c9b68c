import ml_dtypes
import numpy as np
import pytest
import torch

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
