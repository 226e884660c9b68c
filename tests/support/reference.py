"""What a reduction must give, computed in float64 (integers: exactly), and data that differ by rank and by index."""

import functools
import itertools

import numpy as np

from ringreduce import runtime
from ringreduce.arrays.dtypes import TABLE
from ringreduce.collectives.ops import Average, Max, Min, Product, Sum
from tests.support.tiers import adapters, parted

REDUCES = {Average: np.mean, Sum: np.sum, Min: np.min, Max: np.max, Product: np.prod}
"""What NumPy makes of the stacked arrays of all ranks."""
COMBINES = {Average: np.add, Sum: np.add, Min: np.minimum, Max: np.maximum, Product: np.multiply}
LOGICAL = {Sum: np.logical_or, Max: np.logical_or, Min: np.logical_and, Product: np.logical_and}
OPS = list(REDUCES)
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]


def data(dtype, count, rank, seed=0):
    """`count` elements for a rank; every rank and index has its own. Integers stay small, so that no sum overflows."""
    generator = np.random.default_rng([seed, rank, count])
    if dtype == "bool":
        return generator.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:
        low = 0 if dtype.startswith("u") else -3
        return generator.integers(low, 4, count).astype(dtype)
    values = generator.uniform(0.5, 1.5, count) * generator.choice([-1, 1], count)
    if dtype in COMPLEX:
        values = values + 1j * generator.uniform(-1, 1, count)
    return values.astype(numpy_dtype(dtype))


class Exporter:
    """Of an array: it speaks DLPack only, as a JAX array does, and is not to be written to."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def numpy_dtype(name):
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def legal(op, dtype):
    return not (dtype == "bool" and op is Average) and not (dtype in COMPLEX and op in (Min, Max))


MATRIX = [(name, op) for name, op in itertools.product(TABLE, OPS) if legal(op, name)]
"""Every type with every op that it knows."""
ONE_OF_EACH_CLASS = ("bool", "int8", "int64", "float16", "bfloat16", "float32", "complex128")
FEW = [(name, op) for name, op in MATRIX if name in ONE_OF_EACH_CLASS and op in (Average, Sum, Min)]
"""What shows that an algorithm moves each kind of element right: the arithmetic is tested by its test_ops.py."""
ONE_OF_EACH = [("bool", Min), ("int8", Sum), ("float16", Average), ("bfloat16", Sum), ("float32", Average)]
"""What shows the same once more: on other ways, or between real processes."""
ONE_OF_EACH_SIZE = [*ONE_OF_EACH, ("int64", Average), ("complex128", Sum)]
FEW_TYPES = parted(TABLE, lambda dtype: dtype in ONE_OF_EACH_CLASS)
"""For parametrize: what shows that elements of every size are moved right; the other types are extended."""
SIZES = parted(range(1, 10), lambda size: size in (1, 2, 3, 4, 7))
"""For parametrize: so many ranks."""
readable = {"ids": lambda value: str(getattr(value, "value", value))}
"""For parametrize: ops by their names."""


def all_but_few_extended(pairs):
    """For parametrize: of these pairs of a type and an op only FEW run always, and ONE_OF_EACH_SIZE in quick tests."""
    few, others = ([pair for pair in pairs if (pair in FEW) is one] for one in (True, False))
    return parted(few, lambda *pair: pair in ONE_OF_EACH_SIZE, adapters) + parted(others, lambda *_: False)


def all_but_one_of_each_extended(pairs):
    """The same, of which only ONE_OF_EACH run always."""
    return parted(pairs, lambda *pair: pair in ONE_OF_EACH)


def reduced(op, arrays):
    """The reduction of all ranks' arrays, wide: float64, complex128, int64 or bool."""
    if arrays[0].dtype == bool:
        wide, combine = arrays, LOGICAL[op]
    else:
        kind = arrays[0].dtype.kind
        wide = [each.astype({"c": "complex128", "i": "int64", "u": "int64"}.get(kind, "float64")) for each in arrays]
        combine = COMBINES[op]
    total = functools.reduce(combine, wide)
    if op is Average:
        exact = total / len(arrays)
        return np.trunc(exact).astype(np.int64) if total.dtype.kind == "i" else exact
    return total


def folded(op, arrays, prescale=1.0, postscale=1.0):
    """The reduction rank by rank, in the type of the sums, rounded once: what must come out to the bit."""
    dtype, size = arrays[0].dtype, len(arrays)
    whole = dtype.kind in "iu"
    wide = np.dtype(np.float32) if dtype.name in ("float16", "bfloat16") else dtype
    wide = np.dtype(np.int64) if op is Average and whole and dtype.itemsize < 8 else wide

    def scaled(values, factor):
        if factor == 1:
            return values
        return np.trunc(values * np.float64(factor)).astype(wide) if whole else values * wide.type(factor)

    with np.errstate(all="ignore"):
        parts = [scaled(each.astype(wide), prescale) for each in arrays]
        if op is Average and whole:
            parts = [each.astype(object) for each in parts]  # Python's integers, which are as long as they must be
        total = functools.reduce(COMBINES[op], parts)
        if op is Average and whole:
            total = (abs(total) // size * np.where(total < 0, -1, 1)).astype(wide)  # toward zero, and exact
        elif op is Average and size > 1:
            total = total / wide.type(size)
        return scaled(total, postscale).astype(dtype)


def assert_same_bits(found, expected, name=None):
    """The same elements, to the bit, but for what bits a NaN has. name: of the type whose bits integers hold."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    dtype = numpy_dtype(name or found.dtype.name)
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    found, expected = (np.ascontiguousarray(each).reshape(-1).view(part) for each in (found, expected))
    same = found.view(f"u{part.itemsize}") == expected.view(f"u{part.itemsize}")
    if part.kind not in "biu":
        same |= np.isnan(found) & np.isnan(expected)
    assert same.all(), f"{(~same).sum()} of {same.size}: {found[~same][:8]}, expected {expected[~same][:8]}"


def roundings(dtype, ranks, hosts=()):
    """How often partial results are rounded at most, beside the finished one."""
    hosts = hosts or (runtime.current_world("test").hosts if runtime.is_initialized() else ())
    return ranks if len(set(hosts)) > 1 and dtype.kind not in "biu" and dtype.itemsize == 2 else 0


def assert_reduced(result, op, arrays, hosts=()):
    """`result` is the reduction of `arrays` within the rounding of its type.

    16-bit floats are rounded just once; but among several hosts with each host's part, or rank's.  hosts: of ranks.
    """
    expected = reduced(op, arrays)
    dtype = result.dtype
    if dtype.kind in "biu":
        np.testing.assert_array_equal(result, expected.astype(dtype))
        return
    epsilon = {"float16": 2**-11, "bfloat16": 2**-8}.get(dtype.name)
    if epsilon is None:
        epsilon = len(arrays) * np.finfo(dtype).eps
    magnitude = sum(np.abs(each.astype(expected.dtype)) for each in arrays) if op is not Product else np.abs(expected)
    single_precision = 0 if dtype.itemsize > 2 else len(arrays) * 2**-23 * magnitude
    allowed = epsilon * (np.abs(expected) if dtype.itemsize == 2 else magnitude) + single_precision
    allowed += epsilon * roundings(dtype, len(arrays), hosts) * magnitude
    assert (np.abs(result.astype(expected.dtype) - expected) <= allowed).all()
