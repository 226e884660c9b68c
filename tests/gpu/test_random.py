"""A random job on GPU arrays, beside the same job on the host's: equal bits, whatever the order and the streams.

The plan is that of support/random_job.py: every kind of collective, all element types, several process sets, other data
in each step. Each tensor is made by CuPy or torch (ranks differ), on one of several streams; some are late, some not
aligned; its memory is let go at once; its result is waited for on another stream.
"""

import dataclasses
import random

import numpy as np
import pytest

import ringreduce as rr
from tests.gpu.libraries import libraries, same_bits
from tests.support.random_job import begin, step_of, tensors
from tests.support.reference import COMPLEX

pytestmark = pytest.mark.mpi
COUNT, STEPS, STREAMS = 80, 4, 3
FACTORS = [1, 1, 7, 331, 4099]
"""More rows than tests/support/random_job.py has: odd numbers of elements, up to some megabytes."""


def plan_of(seed, sets):
    """The plan, the same on all ranks, and its tensors."""
    plan = random.Random(seed)
    drawn = [each for each in tensors(plan, sets, rr.size(), COUNT) if makers(each.dtype)]
    for each in drawn:
        each.shape = (each.shape[0] * plan.choice(FACTORS), each.shape[1])
    return plan, drawn


def makers(dtype):
    """The libraries that have a type; none here for bfloat16 without torch."""
    return [library for library in libraries() if dtype in library.dtypes]


def submit(tensor, order, streams):
    """Make a tensor's arrays on some stream, submit them, and let them go; the handle."""
    library = order.choice(makers(tensor.dtype))
    with library.on(order.choice(streams[library.name])):
        late_ms = order.choice([0, 0, 0, 2])
        arrays = [library.put(each, late_ms, order.randint(0, 3)) for each in tensor.arrays(rr.rank())]
        return library, begin(tensor, arrays)


def as_arrays(result):
    return list(result) if isinstance(result, list | tuple) else [result]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_bits_are_the_hosts(path, sets, seed):
    plan, drawn = plan_of(seed, sets)
    order = random.Random(1000 * seed + rr.rank())
    streams = {each.name: [each.current(), *(each.stream() for _ in range(STREAMS))] for each in libraries()}
    waited = 0
    for step in range(STEPS):
        mine = [each for each in step_of(plan, drawn, step, mistakes=False) if rr.rank() in each.ranks]
        order.shuffle(mine)
        on_gpu = {each.name: submit(each, order, streams) for each in mine}
        on_host = {
            each.name: begin(dataclasses.replace(each, name=f"{each.name}.host"), each.arrays(rr.rank()))
            for each in sorted(mine, key=lambda each: each.number)
        }
        order.shuffle(mine)
        for each in mine:
            library, handle = on_gpu[each.name]
            expected = as_arrays(rr.synchronize(on_host[each.name]))
            with library.on(order.choice(streams[library.name])):
                found = [library.get(array) for array in as_arrays(rr.synchronize(handle))]
            assert len(found) == len(expected)
            fuses = each.dtype in COMPLEX and each.op is rr.Product
            for one, other in zip(found, expected, strict=True):
                same_bits(one, np.asarray(other), fuses)
        waited += len(mine)
    assert waited > COUNT
