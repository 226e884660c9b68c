"""Adasum on threads: against its definition in extended precision, and at any scale."""

import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr
from ringreduce.collectives import adasum
from ringreduce.testing import run_ranks
from ringreduce.transport.base import complete
from tests.support import matrix
from tests.support.loops import in_a_loop
from tests.support.on_threads import each_rank_of, transport
from tests.support.reference import data


@in_a_loop("name", ["float32", "float64", "complex64", "complex128"])
@in_a_loop("size", [1, 2, 4, 8])
def test_adasum_on_a_power_of_two_of_ranks(size, name):
    arrays = [data(name, 101, rank) for rank in range(size)]

    def program():
        flat = arrays[transport().rank].copy()
        complete(adasum.allreduce(flat, transport(), segment_bytes=64))
        return flat

    results = run_ranks(size, program)
    wide = np.clongdouble if name.startswith("complex") else np.longdouble
    tolerance = 20 * np.finfo(name).eps
    np.testing.assert_allclose(results[0], matrix.adasum([each.astype(wide) for each in arrays]), tolerance, tolerance)
    assert all(result.tobytes() == results[0].tobytes() for result in results), "the same bits on every rank"


def test_adasum_adds_what_is_orthogonal_averages_what_is_equal_and_knows_zero():
    one, other = np.array([3.0, 0.0]), np.array([0.0, 2.0])
    assert adasum.combine(one, other).tolist() == [3, 2]
    assert adasum.combine(one, one).tolist() == [3, 0]
    assert adasum.combine(one, 3 * one).tolist() == [6, 0], "the mean of parallel ones"
    assert adasum.combine(one, -one).tolist() == [0, 0]
    assert adasum.combine(one, 0 * one).tolist() == [3, 0]
    assert adasum.combine(0 * one, other).tolist() == [0, 2]
    assert adasum.combine(np.array([1j]), np.array([1.0 + 0j])).tolist() == [1 + 1j], "orthogonal as vectors"


@in_a_loop("dtype", ["float32", "float64", "complex64"])
@in_a_loop("far", [0, 2, 20])
@in_a_loop("exponent", [-300, -150, -38, -20, 0, 18, 37, 150, 300])
def test_adasum_of_tiny_and_huge_vectors(dtype, exponent, far):
    """Nothing vanishes or overflows: parallel vectors are averaged, orthogonal ones added, at any scale."""
    info = np.finfo(dtype)
    if not info.minexp < 3.4 * exponent <= 3.4 * (exponent + far) < info.maxexp - 4:
        return
    a = np.array([3, 0, 1, 0], dtype) * info.dtype.type(10.0**exponent)
    b = np.array([6, 0, 2, 0], dtype) * info.dtype.type(10.0 ** (exponent + far))
    np.testing.assert_allclose(adasum.combine(a, b), a / 2 + b / 2, 4 * info.eps)
    np.testing.assert_allclose(adasum.combine(a, np.roll(b, 1)), a + np.roll(b, 1), 4 * info.eps)


@pytest.mark.parametrize(("dtype", "values"), [(np.float16, [1e-7, 6e4]), (ml_dtypes.bfloat16, [1e-38, 1e38])])
@each_rank_of(2)
def test_adasum_of_tiny_and_huge_16_bit_floats(dtype, values):
    for value in values:
        array = np.full(4, value, dtype)
        assert rr.allreduce(array, op=rr.Adasum).tolist() == array.tolist(), "equal vectors are averaged"


@in_a_loop("size", [1, 2, 4, 8])
def test_adasum_takes_a_logarithm_of_rounds(size):
    messages = []
    run_ranks(size, lambda: complete(adasum.allreduce(np.ones(10), transport())), messages=messages)
    assert len(messages) == size * (size - 1).bit_length()
    assert all(message.nbytes == 80 for message in messages)
