"""GPU arrays that their owner forgets while GPUs still read and write them: no pool gives their memory to others."""

import functools
import threading

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.testing import run_ranks
from ringreduce.transport.base import Work
from tests.ranks.gpu.test_gpu import SLOT_BYTES, WORLDS, ranks, small, values
from tests.support import fake_cupy
from tests.support.tiers import parted

SOME = parted([WORLDS[name] for name in ("alone", "three", "hosts", "hosts of two")], lambda hosts: len(hosts) == 3)
PATHS = [{}, {"cuda_ipc": False}]
COUNT, STEPS = 3000, 6


def summed(size, step):
    return sum(values(COUNT, "float32", rank, step) for rank in range(size))


@pytest.mark.parametrize("forgotten", ["inputs", "handles", "results"])
@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("hosts", SOME, ids=str)
def test_arrays_are_forgotten_while_they_are_used(gpu, hosts, path, forgotten):
    """Inputs once they are submitted, their handles too, results while they are read."""

    def program():
        kept = {}
        for step in range(STEPS):
            array = gpu.asarray(values(COUNT, "float32", rr.rank(), step))
            handle = rr.allreduce_async(array, op=rr.Sum, name=f"t{step}")
            del array
            if forgotten == "results":
                kept[step] = rr.synchronize(handle) * np.float32(1)
            else:
                kept |= {step: handle} if forgotten == "inputs" else {}
                gpu.full(COUNT, 77, np.float32)  # may get the memory of an array that is gone
            del handle
        if forgotten == "inputs":
            kept = {step: rr.synchronize(each) for step, each in kept.items()}
        kept[STEPS] = rr.allreduce(gpu.asarray(values(COUNT, "float32", rr.rank(), STEPS)), op=rr.Sum)
        return {step: each.get() for step, each in kept.items()}

    for results in ranks(hosts, program, **path):
        for step, result in results.items():
            np.testing.assert_array_equal(result, summed(len(hosts), step))


class UntilSet(threading.Event, Work):
    """A request of an operation that takes long."""

    peer = 0
    done = threading.Event.is_set


def gpu_memory():
    """Blocks on the GPU of this process: all ranks'."""
    with fake_cupy.machine.entered():
        return sum(each.nbytes for each in fake_cupy.machine.memory.in_use() if each.kind == "device")


@pytest.mark.parametrize("devices", [1, 3], ids=["ipc", "nccl"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_process_set_that_is_removed_gives_its_memory_back(cupy, devices, busy):
    """Also one that was removed while its operations were under way: then when they are done."""
    cupy.machine.device_count = devices

    def program():
        cupy.cuda.Device(rr.rank() % devices).use()
        left = []
        for number in range(3):
            some = rr.add_process_set([0, 1])
            if some.included():
                array = cupy.array(values(COUNT, "float32", rr.rank(), number))
                handle = rr.allreduce_async(array, op=rr.Sum, name=f"w{number}", process_set=some)
                np.testing.assert_array_equal(rr.synchronize(handle).get(), summed(2, number))
                del array, handle
            engine, ended = runtime.current("test").engine, UntilSet()
            if busy and some.included():
                steps = iter([ended])
                engine._inbox.call_soon(functools.partial(engine.states[some.process_set_id].executor.enqueue, steps))
            threading.Timer(0.2, ended.set).start()
            rr.remove_process_set(some)
            assert ended.is_set() or not busy or not some.included()
            rr.barrier()
            left.append(gpu_memory())
            rr.barrier()
        return left

    settings = small(dynamic_process_sets=True, cuda_nccl=True)
    for left in run_ranks(3, program, settings=settings, timeout_s=60):
        assert left[-1] - left[0] < 4 * SLOT_BYTES, left
