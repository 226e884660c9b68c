"""Every kernel set against conversions made here, over all bit patterns that matter."""

import itertools
import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest

from ringreduce.kernels import half_numpy
from ringreduce.kernels.optional import imported
from tests.support.reference import assert_same_bits
from tests.support.tiers import extended

NAMES = ("float16", "bfloat16")
VALUE = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
STORAGE = {"float16": np.float16, "bfloat16": np.uint16}
EVERY = np.arange(2**16, dtype=np.uint16)
COUNTS = [0, 1, 1000, 4096, half_numpy.BLOCK, 2 * half_numpy.BLOCK + 7]


@pytest.fixture(params=["numpy", "torch", "numba"])
def kernels(request):
    """The kernels of one maker, for "float16" and "bfloat16"."""
    if request.param == "numba":
        pytest.importorskip("numba")
        half_numba = imported("half_numba")
        if half_numba is None:
            pytest.skip("numba cannot convert float16 on this processor")
        return half_numba.KERNELS
    if request.param == "torch":
        pytest.importorskip("torch")
        from ringreduce.kernels import half_torch

        return half_torch.KERNELS
    return half_numpy.KERNELS


def value(name, stored):
    """The stored elements in float32, by another's conversion."""
    return np.asarray(stored).view(VALUE[name]).astype(np.float32)


def rounded(name, values):
    """Rounded to 16 bits, by another's conversion."""
    with np.errstate(all="ignore"):
        return np.asarray(values).astype(VALUE[name]).view(STORAGE[name])


def random_elements(name, count, seed=0):
    bits = np.random.default_rng([seed, count]).integers(0, 2**16, count, np.uint16)
    return bits.view(STORAGE[name])


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_pattern_is_widened_exactly(kernels, name):
    stored = EVERY.view(STORAGE[name])
    wide = np.empty(2**16, np.float32)
    kernels[name].widen(stored, wide)
    assert_same_bits(wide, value(name, stored))


@pytest.mark.parametrize("name", NAMES)
def test_values_between_all_neighbours_are_rounded_to_nearest_even(kernels, name):
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
    kernels[name].narrow(values, out)
    assert_same_bits(out, rounded(name, values), name)


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FBFFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFF800001])
@pytest.mark.parametrize("name", NAMES)
def test_no_nan_becomes_a_number(kernels, name, bits):
    out = np.zeros(3, STORAGE[name])
    kernels[name].narrow(np.full(3, bits, np.uint32).view(np.float32), out)
    assert np.isnan(value(name, out)).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_parts_are_summed_in_order_in_float32_and_rounded_once(kernels, name, size):
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
            kernels[name].sum_parts(parts, out, np.float32(divisor), np.float32(0 if divisor == 3 else 1 / divisor))
        assert_same_bits(out, expected, name)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_sum_may_replace_a_part(kernels, name, position):
    parts = [random_elements(name, 2 * half_numpy.BLOCK + 7, seed) for seed in range(3)]
    with np.errstate(all="ignore"):
        expected = rounded(name, value(name, parts[0]) + value(name, parts[1]) + value(name, parts[2]))
        kernels[name].sum_parts(parts, parts[position][:], np.float32(1), np.float32(1))
    assert_same_bits(parts[position], expected, name)


def test_a_protected_array_is_read_without_a_copy():
    array = np.arange(3)
    array.flags.writeable = False
    alias = half_numpy.writable(array)
    assert alias.flags.writeable
    assert np.shares_memory(alias, array)


CHOICE = """
    import sys
    {before}
    from ringreduce.kernels import half
    {after}
    print(half.kernel_name(), "torch" in sys.modules)
"""
WITHOUT_NUMBA = "sys.modules['numba'] = None"
COMPILED = "from ringreduce.kernels import optional; optional._compiling('half_numba').join()"


@pytest.mark.parametrize(
    ("before", "after", "variables", "expected"),
    [
        (WITHOUT_NUMBA, "", {}, "numpy False"),
        pytest.param(WITHOUT_NUMBA, "half.kernels('float16'); import torch", {}, "torch True", marks=extended),
        ("", COMPILED, {"NUMBA_DISABLE_JIT": "1"}, "numpy False"),
        pytest.param("", COMPILED, {}, "numba False", marks=extended),
    ],
    ids=["nothing else is there", "the user has imported torch", "numba does not compile", "numba"],
)
def test_what_converts_and_torch_is_not_imported_for_it(before, after, variables, expected):
    program = textwrap.dedent(CHOICE).format(before=before, after=after)
    environment = os.environ | variables
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert ran.stdout == f"{expected}\n"
