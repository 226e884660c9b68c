"""CUDA's runtime as ringreduce uses it, through CuPy: streams, events, memory. What ranks share is in ipc.py.

Only `Stream.synchronize` blocks. A stream may read what another has written after it was made to `wait` for an `Event`
that the other has recorded; the host, after `Event.done()`.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

import numpy as np

from ringreduce.errors import MissingExtraError

NOT_READY = 600  # cudaErrorNotReady: the event's work is not done


def cupy() -> Any:
    """The module CuPy; raises MissingExtraError where it is not installed."""
    try:
        return importlib.import_module("cupy")
    except ImportError as exc:
        install = "'cupy-cuda12x[ctk]' (or 'cupy-cuda13x[ctk]', as your driver has it)"
        raise MissingExtraError.of("GPU arrays need CuPy", "cupy", exc, install) from exc


def runtime() -> Any:
    """CuPy's binding of CUDA's runtime."""
    return cupy().cuda.runtime


class Event:
    """A point in a stream's work. A stream that waits for it holds the recorded work, not the event."""

    __slots__ = ("_event", "pointer")

    def __init__(self, stream: int) -> None:
        """After everything queued so far in a stream (its address) of the current device."""
        self._event = cupy().cuda.Event(disable_timing=True)
        self.pointer = int(self._event.ptr)
        runtime().eventRecord(self.pointer, stream)

    def done(self) -> bool:
        """True when the work before it is done; raises CuPy's CUDARuntimeError when it has failed."""
        status = runtime().eventQuery(self.pointer)
        if status not in (0, NOT_READY):
            raise runtime().CUDARuntimeError(status)
        return bool(status == 0)


class Stream:
    """A stream of our own on one GPU, independent of the legacy default stream.

    `with stream:` makes it CuPy's current stream in this thread, so that CuPy's and our kernels run there.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        with device:
            self._stream = cupy().cuda.Stream(non_blocking=True)
        self.pointer = int(self._stream.ptr)

    def record(self) -> Event:
        """An event after everything queued in this stream so far."""
        return self.device.record(self.pointer)

    def wait(self, event: Event) -> None:
        """Make what is queued from now on wait for an event; the host does not wait."""
        runtime().streamWaitEvent(self.pointer, event.pointer)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Queue a copy between host or device addresses; host memory must be pinned, and stay valid."""
        runtime().memcpyAsync(target, source, nbytes, runtime().memcpyDefault, self.pointer)

    def upload(self, values: np.ndarray[Any, Any]) -> Any:
        """A CuPy array of these values; only later work of this stream gets its memory out of CuPy's pool again."""
        with self.device, self:
            return cupy().asarray(values)

    def use(self) -> None:
        """Make it CuPy's current stream, and its device the current one, in this thread for good.

        An endless `with`: CuPy forgets its own `use()` at the end of the next `with`.
        """
        runtime().setDevice(self.device.index)
        self._stream.__enter__()

    def synchronize(self) -> None:
        """Block until everything queued is done."""
        runtime().streamSynchronize(self.pointer)

    def __enter__(self) -> Stream:
        self._stream.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.__exit__(*exception)


class Device:
    """One GPU as this process uses it; made by `device`. `with device:` makes it this thread's current one."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._current = threading.local()

    @functools.cached_property
    def pci_bus_id(self) -> str:
        """Such as 0000:3B:00.0: which GPU of the host it is, whatever its index here."""
        return str(runtime().deviceGetPCIBusId(self.index))

    def record(self, stream: int) -> Event:
        """An event after everything queued so far in a stream (its address) of this device."""
        with self:  # 0 means the default stream of the thread's current device
            return Event(stream)

    def wait(self, stream: int, event: Event) -> None:
        """Make what is queued from now on in a stream (its address) of this device wait for an event."""
        with self:
            runtime().streamWaitEvent(stream, event.pointer)

    def __enter__(self) -> Device:
        stack = self._current.__dict__.setdefault("stack", [])
        stack.append(runtime().getDevice())
        if stack[-1] != self.index:
            runtime().setDevice(self.index)
        return self

    def __exit__(self, *exception: object) -> None:
        before = self._current.stack.pop()
        if before != self.index:
            runtime().setDevice(before)


@functools.cache
def device(index: int) -> Device:
    """The GPU with this index among those that this process sees."""
    return Device(index)


class Block:
    """Memory on a GPU, zeroed, aligned to 256 bytes, freed only by `free`; from no pool, so that others can map it."""

    def __init__(self, owner: Device, nbytes: int) -> None:
        self.device, self.nbytes = owner, nbytes
        with owner:
            self.pointer = int(runtime().malloc(nbytes))
            stream = cupy().cuda.Stream(non_blocking=True)  # on the default stream it would wait for the caller's work
            runtime().memsetAsync(self.pointer, 0, nbytes, int(stream.ptr))
            runtime().streamSynchronize(int(stream.ptr))

    def elements(self, dtype: np.dtype[Any], low: int, high: int) -> Any:
        """Bytes low:high as a 1-D CuPy array of `dtype`."""
        return view(self.pointer + low, high - low, dtype, self, self.device.index)

    def free(self) -> None:
        """Free it, after all that have mapped it have closed it. Like cudaFree it waits for the device's work."""
        with self.device:
            runtime().free(self.pointer)


def view(pointer: int, nbytes: int, dtype: np.dtype[Any], owner: Any, index: int) -> Any:
    """Memory on GPU `index` as a 1-D CuPy array, which keeps `owner` alive."""
    module = cupy()
    memory = module.cuda.UnownedMemory(pointer, nbytes, owner, index)
    return module.ndarray((nbytes // dtype.itemsize,), dtype, memptr=module.cuda.MemoryPointer(memory, 0))


class Pinned:
    """Pinned host memory, which the GPU can read and write: `array`, 1-D uint8, at address `pointer`."""

    def __init__(self, nbytes: int) -> None:
        module = cupy()
        self._memory = module.cuda.alloc_pinned_memory(max(1, nbytes))
        self.array: np.ndarray[Any, Any] = np.frombuffer(self._memory, np.uint8, nbytes)
        self.pointer = int(self._memory.ptr)

    def elements(self, dtype: np.dtype[Any], nbytes: int) -> Any:
        """The first `nbytes` as a 1-D array of `dtype`."""
        return self.array[:nbytes].view(dtype)
