"""cupy.cuda: devices, streams and memory as objects."""

import collections
import ctypes
import threading

import tests.support.fake_cupy as fake
from tests.support.fake_cupy import nccl, runtime

__all__ = ["nccl", "runtime"]


class memory:
    """As cupy.cuda.memory."""

    class OutOfMemoryError(MemoryError):
        pass


class Device:
    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else int(device)
        self._before = []

    def use(self):
        runtime.setDevice(self.id)

    def synchronize(self):
        with self:
            runtime.deviceSynchronize()

    @property
    def pci_bus_id(self):
        return runtime.deviceGetPCIBusId(self.id)

    def __enter__(self):
        self._before.append(runtime.getDevice())
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *_):
        runtime.setDevice(self._before.pop())

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self):
        return self.id

    def __int__(self):
        return self.id


class _Current(threading.local):
    """The thread's current streams, one a device, and those of the `with` statements under way, also by device.

    As in CuPy, the end of one goes back to that around it, not to what use() has made current meanwhile.
    """

    def __init__(self):
        self.streams, self.around, self.devices = {}, collections.defaultdict(list), []


_current = _Current()
synchronized = []
"""The threads that waited for a stream, by CuPy's object."""


class _AnyStream:
    def __init__(self, ptr, device_id):
        self.ptr, self.device_id = ptr, device_id

    def synchronize(self):
        synchronized.append(threading.current_thread().name)
        runtime.streamSynchronize(self.ptr)

    @property
    def done(self):
        return runtime.streamQuery(self.ptr) == 0

    def record(self, event=None):
        event = event or Event()
        runtime.eventRecord(event.ptr, self.ptr)
        return event

    def wait_event(self, event):
        runtime.streamWaitEvent(self.ptr, event.ptr)

    def use(self):
        _current.streams[self._checked_device()] = self
        return self

    def __enter__(self):
        device = self._checked_device()
        _current.devices.append(device)
        _current.around[device].append(self)
        _current.streams[device] = self
        return self

    def __exit__(self, *_):
        device = _current.devices.pop()
        _current.around[device].pop()
        _current.streams[device] = _current.around[device][-1] if _current.around[device] else None

    def _checked_device(self):
        if self.device_id not in (-1, runtime.getDevice()):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device "
                f"({runtime.getDevice()})"
            )
        return runtime.getDevice()

    def __eq__(self, other):
        return isinstance(other, _AnyStream) and self.ptr == other.ptr

    def __hash__(self):
        return self.ptr


class Stream(_AnyStream):
    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        if null or ptds:
            super().__init__(runtime.streamPerThread if ptds else 0, -1)
        else:
            self.ptr, self._machine = 0, fake.machine
            super().__init__(runtime.streamCreateWithFlags(int(non_blocking)), runtime.getDevice())

    def __del__(self):
        if self.ptr not in (0, runtime.streamPerThread):
            self._machine.drop(self.ptr)


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


class ExternalStream(_AnyStream):
    def __init__(self, ptr, device_id=-1):
        super().__init__(ptr, device_id)


def get_current_stream(device_id=-1):
    stream = _current.streams.get(runtime.getDevice() if device_id == -1 else device_id)
    if stream is None or (isinstance(stream, Stream) and stream.ptr > 2 and stream._machine is not fake.machine):
        return Stream.null
    return stream


class Event:
    def __init__(self, block=False, disable_timing=False, interprocess=False):
        flags = (runtime.eventBlockingSync * block) | (runtime.eventDisableTiming * disable_timing)
        self.ptr = runtime.eventCreateWithFlags(flags | runtime.eventInterprocess * interprocess)

    @property
    def done(self):
        return runtime.eventQuery(self.ptr) == 0

    def record(self, stream=None):
        runtime.eventRecord(self.ptr, (stream or get_current_stream()).ptr)

    def synchronize(self):
        runtime.eventSynchronize(self.ptr)


def get_elapsed_time(start_event, end_event):
    return runtime.eventElapsedTime(start_event.ptr, end_event.ptr)


class UnownedMemory:
    """Memory that somebody else keeps."""

    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner = ptr, size, owner
        self.device_id = runtime.getDevice() if device_id == -1 else device_id


class PooledMemory:
    """Memory out of the pool of the thread's current stream, to which it goes back."""

    def __init__(self, size):
        self.machine = fake.machine
        with self.machine.entered():
            stream = self.machine.stream(get_current_stream().ptr)
            try:
                self.allocation = self.machine.allocate(size, pool=stream)
            except runtime.CUDARuntimeError as exc:
                raise memory.OutOfMemoryError(f"Out of memory allocating {size:,} bytes") from exc
        self.ptr, self.size, self.device_id = self.allocation.base, size, self.allocation.device

    def __del__(self):
        if hasattr(self, "allocation"):
            self.machine.drop(self.allocation)


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset

    @property
    def device_id(self):
        return self.mem.device_id

    @property
    def device(self):
        return Device(self.mem.device_id)


def alloc(size):
    return MemoryPointer(PooledMemory(size), 0)


class _Pinned:
    """What keeps pinned memory: it goes back to its pool, at once, when nobody holds it."""

    def __init__(self, nbytes):
        self.machine = fake.machine
        with self.machine.entered():
            self.allocation = self.machine.allocate(nbytes, "pinned")

    def __del__(self):
        self.machine.drop(self.allocation)


def alloc_pinned_memory(size):
    """A ctypes array, for its buffer protocol, with CuPy's attributes."""
    owner = _Pinned(size)
    pinned = type("PinnedMemoryPointer", (ctypes.c_uint8 * size,), {}).from_address(owner.allocation.base)
    pinned.mem, pinned.ptr = owner, owner.allocation.base
    return pinned


class MemoryPool:
    """The fake keeps no memory back."""

    def free_all_blocks(self, stream=None):
        pass
