"""GPU arrays that their owner forgets while GPUs still read and write them: no pool gives their memory to others."""

import numpy as np
import pytest

import ringreduce as rr
from tests.ranks.test_gpu import WORLDS, gpu, ranks, values  # noqa: F401  gpu is a fixture

SOME = [WORLDS[name] for name in ("alone", "three", "hosts", "bridged")]
WAYS = [{}, {"cuda_ipc": False}]
COUNT, STEPS = 3000, 6


def summed(size, step):
    return sum(values(COUNT, "float32", rank, step) for rank in range(size))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("hosts", SOME, ids=str)
def test_inputs_are_forgotten_once_they_are_submitted(gpu, hosts, way):  # noqa: F811
    def program():
        handles = []
        for step in range(STEPS):
            array = gpu.asarray(values(COUNT, "float32", rr.rank(), step))
            handles.append(rr.allreduce_async(array, op=rr.Sum, name=f"t{step}"))
            del array
            gpu.full(COUNT, 77, np.float32)  # may get the memory of an array that is gone
        return [rr.synchronize(handles.pop(0)).get() for _ in range(STEPS)]

    for results in ranks(hosts, program, **way):
        for step, result in enumerate(results):
            np.testing.assert_array_equal(result, summed(len(hosts), step))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("hosts", SOME, ids=str)
def test_handles_are_forgotten_too(gpu, hosts, way):  # noqa: F811
    def program():
        for step in range(STEPS):
            array = gpu.asarray(values(COUNT, "float32", rr.rank(), step))
            rr.allreduce_async(array, op=rr.Sum, name=f"t{step}")
            del array
            gpu.full(COUNT, 77, np.float32)
        return rr.allreduce(gpu.asarray(values(COUNT, "float32", rr.rank(), 9)), op=rr.Sum).get()

    for result in ranks(hosts, program, **way):
        np.testing.assert_array_equal(result, summed(len(hosts), 9))


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("hosts", SOME, ids=str)
def test_results_are_forgotten_while_they_are_read(gpu, hosts, way):  # noqa: F811
    def program():
        doubled = []
        for step in range(STEPS):
            array = gpu.asarray(values(COUNT, "float32", rr.rank(), step))
            result = rr.allreduce(array, op=rr.Sum)
            doubled.append(result * np.float32(2))
            del result, array
        return [each.get() for each in doubled]

    for results in ranks(hosts, program, **way):
        for step, result in enumerate(results):
            np.testing.assert_array_equal(result, 2 * summed(len(hosts), step))
