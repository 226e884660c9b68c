"""Every collective × form × element type × op × process set × 1 to 4 ranks, on threads. See tests/support/matrix.py."""

import dataclasses
import functools
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import run_ranks
from tests.support import matrix
from tests.support.on_threads import each_rank_of, known
from tests.support.reference import (
    COMPLEX,
    FEW_TYPES,
    FLOATS,
    MATRIX,
    all_but_few_extended,
    assert_reduced,
    data,
    readable,
)
from tests.support.tiers import parted

SIZES = [1, 2, 3, 4]
THREE = parted(SIZES, lambda size: size == 3)


def run_on_all_sets(size, program):
    """Run it among all ranks, and among some; what it returns is equal on all that took part."""
    some = matrix.SOME_RANKS[size]

    def on_a_rank():
        everyone = program(list(range(size)), rr.global_process_set)
        if rr.rank() not in some:
            return everyone, None
        return everyone, program(sorted(some), known(some, 1))

    results = run_ranks(size, on_a_rank, settings=matrix.SMALL, process_sets=[some] if some else [])
    assert all(everyone == results[0][0] for everyone, _ in results)
    assert all(results[rank][1] == results[some[0]][1] for rank in some)


@pytest.mark.parametrize(("dtype", "op"), all_but_few_extended(MATRIX), **readable)
@pytest.mark.parametrize("size", THREE)
def test_allreduce(size, dtype, op):
    run_on_all_sets(size, functools.partial(matrix.allreduce_program, dtype, op))


@pytest.mark.parametrize(("dtype", "op"), all_but_few_extended(matrix.SCALINGS), **readable)
@pytest.mark.parametrize("size", parted([1, 3], lambda size: size == 3))
def test_allreduce_with_prescale_and_postscale(size, dtype, op):
    run_on_all_sets(size, functools.partial(matrix.scaled_program, dtype, op))


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
@pytest.mark.parametrize("size", parted([1, 2, 4], lambda size: size == 4))
def test_adasum(size, dtype):
    run_on_all_sets(size, functools.partial(matrix.adasum_program, dtype))


@pytest.mark.parametrize("dtype", FEW_TYPES)
@pytest.mark.parametrize("program", matrix.COPIES)
@pytest.mark.parametrize("size", THREE)
def test_copies(size, program, dtype):
    run_on_all_sets(size, functools.partial(program, dtype))


@pytest.mark.parametrize(("dtype", "op"), all_but_few_extended(matrix.SCATTERINGS), **readable)
@pytest.mark.parametrize("size", THREE)
def test_reducescatter(size, dtype, op):
    run_on_all_sets(size, functools.partial(matrix.reducescatter_program, dtype, op))


@pytest.mark.parametrize("size", THREE)
def test_objects(size):
    run_on_all_sets(size, matrix.objects_program)


@pytest.mark.parametrize("size", THREE)
def test_nobody_passes_a_barrier_before_all_have_come(size):
    def program(ranks, process_set):
        for late in ranks:
            if rr.rank() == late:
                time.sleep(0.02)
            came.append((late, rr.rank()))
            rr.barrier(process_set)
            assert {rank for at, rank in came if at == late} >= set(ranks)
        came_there = rr.allgather_object(len(ranks), process_set=process_set)
        if rr.rank() == ranks[0]:
            came.clear()
        rr.barrier(process_set)
        return came_there

    came = []
    run_on_all_sets(size, program)


# all is announced at once, by the first wait
@each_rank_of(2, settings=dataclasses.replace(matrix.SMALL, cycle_time_ms=1000.0))
def test_different_things_that_are_agreed_on_together_stay_apart():
    """Ops, scales, roots, types and kinds of one response: what may travel together does, nothing else."""
    ops = [rr.Sum, rr.Average, rr.Min, rr.Max, rr.Product, rr.Adasum]
    dtypes = ["float64", "float32", "int64", "float16"]

    def everyones(number):
        dtype = "float64" if number % 6 == 5 else dtypes[number % 4]
        return [data(dtype, 5 + number % 3, rank, number) for rank in range(2)]

    numbers = range(48)
    reductions = [
        rr.allreduce_async(everyones(n)[rr.rank()], op=ops[n % 6], prescale_factor=[1.0, 2.0][n // 24]) for n in numbers
    ]
    copies = [rr.broadcast_async(everyones(n)[rr.rank()], root_rank=n % 2) for n in numbers]
    gathered = [rr.allgather_async(everyones(n)[rr.rank()]) for n in numbers]
    for n in numbers:
        arrays = everyones(n)
        np.testing.assert_array_equal(rr.synchronize(copies[n]), arrays[n % 2])
        np.testing.assert_array_equal(rr.synchronize(gathered[n]), np.concatenate(arrays))
        scaled = [array * array.dtype.type([1, 2][n // 24]) for array in arrays]
        check = matrix.assert_adasum if ops[n % 6] is rr.Adasum else functools.partial(assert_reduced, op=ops[n % 6])
        check(rr.synchronize(reductions[n]), arrays=scaled)
