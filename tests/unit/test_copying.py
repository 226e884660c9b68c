"""Copies out of memory that another core has written."""

import numpy as np
import pytest

from ringreduce.arrays.dtypes import TABLE
from ringreduce.kernels import copying


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("count", [1, 100, 5001, 65536])
def test_reading_copies_all_bits_of_all_types(name, count):
    dtype = TABLE[name].storage
    source = np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    around = np.zeros(count + 2, dtype)
    copying.read(source, around[1:-1])
    assert around[1:-1].tobytes() == source.tobytes()
    assert not around[[0, -1]].view(np.uint8).any()
