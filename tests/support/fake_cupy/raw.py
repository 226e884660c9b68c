"""cupy.RawModule: kernels of CUDA source, run by tests/support/emulated_cuda.py when their turn in a stream comes."""

import functools
import importlib
import time
from pathlib import Path

import tests.support.fake_cupy as fake
from tests.support.fake_cupy import arrays, cuda
from tests.support.fake_cupy.machine import CUDARuntimeError

NVRTC_DEFAULT = ("--std=c++17",)
HOLD = "hold"
"""The kernel of bench/gpu/gpus.py that only takes time: here too, from when somebody asks for what comes after."""


def _emulator():
    return fake.emulator or importlib.import_module("tests.support.emulated_cuda")


class RawModule:
    def __init__(self, code=None, *, path=None, options=(), backend="nvrtc", name_expressions=None):
        if (code is None) == (path is None) or not isinstance(options, tuple):
            raise TypeError("RawModule takes code or a path, and a tuple of options")
        self._module = _emulator().emulate(code or Path(path).read_text(), options or NVRTC_DEFAULT)

    def get_function(self, name):
        return RawKernel(self._module, name)


class RawKernel:
    def __init__(self, module, name):
        self._module, self.name = module, name

    def __call__(self, grid, block, args, *, shared_mem=0):
        args = tuple(each.data.ptr if isinstance(each, arrays.ndarray) else each for each in args)
        pointer = cuda.get_current_stream().ptr
        with fake.machine.entered():
            stream = fake.machine.stream(pointer)
            if stream.device != fake.machine.device:
                raise CUDARuntimeError(400)

            def ranges():
                reads, writes = _emulator().accesses(self.name, args)
                _check_devices(stream, [*reads, *writes])
                return reads, writes

            def work():
                (blocks,), (threads,) = grid, block
                self._module.launch(self.name, blocks, threads, args)

            fake.machine.queue(
                stream, f"kernel {self.name}{args}", work, ranges, ready=_held_for(*args) if self.name == HOLD else None
            )


def _held_for(nanoseconds):
    @functools.cache
    def end_s():
        return time.monotonic() + nanoseconds / 1e9

    return lambda: time.monotonic() >= end_s()


def _check_devices(stream, ranges):
    """A kernel reads another GPU's memory only where that is mapped."""
    for address, _ in ranges:
        allocation = fake.machine.memory.of(address)
        if allocation is None or allocation.kind != "device" or allocation.device == stream.device:
            continue
        if stream.process not in allocation.mapped:
            raise CUDARuntimeError(700)
