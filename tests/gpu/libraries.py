"""CuPy and torch as the GPU tests use them: arrays that become right only after a while, on a stream of one's own.

Nothing is imported before a GPU was found (conftest.py).
"""

import functools
import importlib.util
from pathlib import Path

import numpy as np

from ringreduce.arrays.dtypes import TABLE
from tests.support.reference import assert_same_bits, numpy_dtype

GPUS = Path(__file__).parents[2] / "bench" / "gpu" / "gpus.py"
CYCLES_PER_MS = 2_000_000
"""Of a fast GPU: on a slower one torch's streams are held up for longer."""


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpus = _load(GPUS)


class _Library:
    """What both do alike."""

    def put(self, array, late_ms=0.0, offset=0):
        """Queue a copy of a NumPy array to the GPU: zeros, until the stream was held up. At `offset` elements."""
        source = self.source(array)
        memory = self.zeros(offset + array.size, source.dtype)
        view = memory[offset:].reshape(array.shape)
        if late_ms:
            self.hold(late_ms)
        view[...] = source
        return view

    def wait(self, event):
        """Let the current stream wait."""
        self.current().wait_event(event)


class Cupy(_Library):
    """CuPy, whose current stream is this thread's own."""

    name = "cupy"
    dtypes = tuple(name for name in TABLE if name != "bfloat16")

    def __init__(self):
        import cupy

        self.module = cupy

    def stream(self):
        return self.module.cuda.Stream(non_blocking=True)

    def on(self, stream):
        return stream

    def current(self):
        return self.module.cuda.get_current_stream()

    def hold(self, milliseconds):
        """Hold the current stream up."""
        gpus.hold(milliseconds)

    def zeros(self, count, dtype):
        return self.module.zeros(count, dtype)

    def source(self, array):
        """A copy on the GPU."""
        return self.module.asarray(array)

    def get(self, array):
        """A NumPy array, when the current stream's work is done."""
        return array.get()

    def event(self):
        """The point that the current stream has reached."""
        event = self.module.cuda.Event(disable_timing=True)
        event.record()
        return event

    def is_done(self, event):
        return bool(event.done)


class Torch(_Library):
    """torch; it has no unsigned integers to speak of, but bfloat16."""

    name = "torch"
    dtypes = tuple(name for name in TABLE if name == "uint8" or not name.startswith("uint"))

    def __init__(self):
        import torch

        self.module = torch

    def stream(self):
        return self.module.cuda.Stream()

    def on(self, stream):
        return self.module.cuda.stream(stream)

    def current(self):
        return self.module.cuda.current_stream()

    def hold(self, milliseconds):
        self.module.cuda._sleep(int(milliseconds * CYCLES_PER_MS))

    def zeros(self, count, dtype):
        return self.module.zeros(count, dtype=dtype, device="cuda")

    def source(self, array):
        is_bfloat16 = array.dtype.name == "bfloat16"
        host = self.module.from_numpy(array.view(np.int16) if is_bfloat16 else array).cuda()
        return host.view(self.module.bfloat16) if is_bfloat16 else host

    def get(self, array):
        if array.dtype == self.module.bfloat16:
            return array.view(self.module.int16).cpu().numpy().view(numpy_dtype("bfloat16"))
        return array.cpu().numpy()

    def event(self):
        event = self.module.cuda.Event()
        event.record()
        return event

    def is_done(self, event):
        return event.query()


@functools.cache
def libraries():
    """Those that have a GPU here; the first is CuPy, without which nothing goes."""
    found = [Cupy()]
    if importlib.util.find_spec("torch") is not None:
        torch = Torch()
        if torch.module.cuda.is_available():
            found.append(torch)
    return found


def same_bits(found, expected, rounding_differs=False):
    """Assert that two NumPy arrays have the same elements, to the bit, but for what bits a NaN has.

    rounding_differs: a host fuses the multiplications and additions of complex products, where its processor can.
    """
    if rounding_differs:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-5 if found.dtype.itemsize == 8 else 1e-13)
    else:
        assert_same_bits(found, expected)
