"""GPU arrays that their owner forgets while GPUs still read and write them: no pool gives their memory to others."""

import functools
import sys
import threading

import numpy as np
import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.gpu import ipc
from ringreduce.testing import run_ranks
from ringreduce.transport.base import Work
from tests.ranks.test_gpu import SLOT_BYTES, WORLDS, as_other_process, gpu, ranks, small, values  # noqa: F401
from tests.support import fake_cupy
from tests.support.tiers import parted

SOME = parted([WORLDS[name] for name in ("alone", "three", "hosts", "hosts of two")], lambda hosts: len(hosts) == 3)
PATHS = [{}, {"cuda_ipc": False}]
COUNT, STEPS = 3000, 6


def summed(size, step):
    return sum(values(COUNT, "float32", rank, step) for rank in range(size))


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("hosts", SOME, ids=str)
def test_inputs_are_forgotten_once_they_are_submitted(gpu, hosts, path):  # noqa: F811
    def program():
        handles = []
        for step in range(STEPS):
            array = gpu.asarray(values(COUNT, "float32", rr.rank(), step))
            handles.append(rr.allreduce_async(array, op=rr.Sum, name=f"t{step}"))
            del array
            gpu.full(COUNT, 77, np.float32)  # may get the memory of an array that is gone
        return [rr.synchronize(handles.pop(0)).get() for _ in range(STEPS)]

    for results in ranks(hosts, program, **path):
        for step, result in enumerate(results):
            np.testing.assert_array_equal(result, summed(len(hosts), step))


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("hosts", SOME, ids=str)
def test_handles_are_forgotten_too(gpu, hosts, path):  # noqa: F811
    def program():
        for step in range(STEPS):
            array = gpu.asarray(values(COUNT, "float32", rr.rank(), step))
            rr.allreduce_async(array, op=rr.Sum, name=f"t{step}")
            del array
            gpu.full(COUNT, 77, np.float32)
        return rr.allreduce(gpu.asarray(values(COUNT, "float32", rr.rank(), 9)), op=rr.Sum).get()

    for result in ranks(hosts, program, **path):
        np.testing.assert_array_equal(result, summed(len(hosts), 9))


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("hosts", SOME, ids=str)
def test_results_are_forgotten_while_they_are_read(gpu, hosts, path):  # noqa: F811
    def program():
        doubled = []
        for step in range(STEPS):
            array = gpu.asarray(values(COUNT, "float32", rr.rank(), step))
            result = rr.allreduce(array, op=rr.Sum)
            doubled.append(result * np.float32(2))
            del result, array
        return [each.get() for each in doubled]

    for results in ranks(hosts, program, **path):
        for step, result in enumerate(results):
            np.testing.assert_array_equal(result, 2 * summed(len(hosts), step))


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
def test_a_process_set_that_is_removed_gives_its_memory_back(monkeypatch, devices, busy):
    """Also one that was removed while its operations were under way: then when they are done."""
    monkeypatch.setattr(ipc, "process", as_other_process)
    with fake_cupy.checked("lazy", device_count=devices) as cupy:
        for name, module in cupy.modules().items():
            monkeypatch.setitem(sys.modules, name, module)

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
                    engine._inbox.call_soon(
                        functools.partial(engine.states[some.process_set_id].executor.enqueue, steps)
                    )
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
