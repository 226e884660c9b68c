import itertools

import numpy as np

from ringreduce.arrays import scan
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import TABLE
from tests.support.loops import in_a_loop

FLOATS = [element for element in TABLE.values() if element.kind in "fc"]


def stored(values, element):
    return element.narrow(values) if element.is_half else values.astype(element.storage)


def largest(flat, element):
    return scan.largest(Buffer(flat, element, flat.shape, "cpu", flat.dtype))()


@in_a_loop("element", FLOATS)
def test_one_bad_element_is_found_wherever_it_is(element):
    block = scan.BLOCK_BYTES // element.itemsize
    plain = stored(np.random.default_rng(1).standard_normal(2 * block + 3), element)
    assert scan.problem(largest(plain, element), element) == ""
    for at, bad in itertools.product((0, block - 1, block, len(plain) - 1), (np.nan, -np.nan, np.inf, -np.inf)):
        flat = plain.copy()
        flat[at : at + 1] = stored(np.array([complex(1, bad) if element.kind == "c" else bad]), element)
        assert scan.problem(largest(flat, element), element) == ("NaN" if np.isnan(bad) else "infinity")


@in_a_loop("sign", [1, -1])
@in_a_loop("element", FLOATS)
def test_what_can_be_summed_is_known_by_its_largest_element(element, sign):
    for value, factor, fits in ((1.0, 2, True), (0.24, 4, True), (0.25, 4, False), (0.51, 2, False), (0.5, 1, True)):
        top = np.float64(65504 if element.name == "float16" else 3.38e38)
        if element.name in ("float64", "complex128"):
            top = np.finfo(np.float64).max
        flat = stored(np.array([0, sign * value * top * (1 if value < 1 else 1e-30), 1e-9]), element)
        assert (largest(flat, element) <= scan.summable(element, float(factor))) is fits, (value, factor)
