"""cupy.cuda.runtime: CUDA's runtime calls, checked as CUDA checks them, or more strictly."""

import ctypes
import os
import struct

import numpy as np

import tests.support.fake_cupy as fake
from tests.support.fake_cupy import processes
from tests.support.fake_cupy.machine import CUDARuntimeError, Event
from tests.support.fake_cupy.memory import Allocation

__all__ = ["CUDARuntimeError"]

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)
eventBlockingSync, eventDisableTiming, eventInterprocess = 1, 2, 4
streamNonBlocking = 1
streamPerThread = 2
cudaIpcMemLazyEnablePeerAccess = 1
HANDLE_BYTES = 64


def runtimeGetVersion():
    return 12090


driverGetVersion = runtimeGetVersion


# devices


def getDeviceCount():
    if fake.machine.device_count == 0:
        raise CUDARuntimeError(100)
    return fake.machine.device_count


def getDevice():
    getDeviceCount()
    return fake.machine.device


def setDevice(device):
    fake.machine.device = device


def deviceGetPCIBusId(device):
    _check_device(device)
    return f"0000:{0x3B + device:02X}:00.0"


def deviceCanAccessPeer(device, peerDevice):
    _check_device(device)
    _check_device(peerDevice)
    return int(device != peerDevice and not fake.refuse_peers)


def getDeviceProperties(device):
    _check_device(device)
    return {"name": b"Fake GPU", "major": 9, "minor": 0, "multiProcessorCount": 4, "totalGlobalMem": 8 << 30}


def deviceSynchronize():
    with fake.machine.entered():
        for stream in list(fake.machine.streams.values()):
            if (stream.process, stream.device) == (fake.machine.process, getDevice()):
                fake.machine.synchronize(stream.last)


def _check_device(device):
    if not 0 <= device < fake.machine.device_count:
        raise CUDARuntimeError(101)


# memory


def malloc(size):
    with fake.machine.entered():
        shared = processes.SharedMemory(size) if size and fake.machine.one_process else None
        return fake.machine.allocate(size, shared=shared).base if size else 0


def free(ptr):
    with fake.machine.entered():
        if ptr == 0:
            return
        deviceSynchronize()
        allocation = _whole_allocation(ptr)
        if allocation.mapped:
            others = ", ".join(sorted(allocation.mapped))
            fake.machine.races.append(f"{allocation} is freed while {others} has it mapped")
        if allocation.shared is not None and allocation.shared.is_mapped_elsewhere:
            fake.machine.races.append(f"{allocation} is freed while another process has it mapped")
        fake.machine.free_at_once(allocation, "cudaFree")


def memGetInfo():
    total = fake.machine.memory_bytes
    return total - fake.machine.memory.used_bytes.get(getDevice(), 0), total


def memcpyAsync(dst, src, size, kind, stream):
    with fake.machine.entered():
        queue = fake.machine.stream(stream)
        _check_kind(dst, src, kind)
        target, source = fake.machine.memory.of(dst), fake.machine.memory.of(src)
        into_pinned = target is not None and target.kind == "pinned"
        from_pinned = source is not None and source.kind == "pinned" and not source.copies_into and not source.freed_by
        before = ctypes.string_at(src, size) if from_pinned else None

        def copy():
            if before is not None and ctypes.string_at(src, size) != before:
                fake.machine.races.append(f"pinned memory at {src:#x} was changed before its copy ran: {operation}")
            ctypes.memmove(dst, src, size)
            if into_pinned:
                target.copies_into -= 1

        if into_pinned:
            target.copies_into += 1
        name = f"memcpyAsync({dst:#x}, {src:#x}, {size})"
        operation = fake.machine.queue(queue, name, copy, lambda: ([(src, size)], [(dst, size)]))


def _check_kind(dst, src, kind):
    kinds = {memcpyHostToDevice: (0, 1), memcpyDeviceToHost: (1, 0), memcpyDeviceToDevice: (1, 1)}
    if kind in kinds:
        lie = tuple(int(_lies_on_a_gpu(each)) for each in (src, dst))
        if lie != kinds[kind]:
            raise CUDARuntimeError(1)


def _lies_on_a_gpu(address):
    allocation = fake.machine.memory.of(address)
    return allocation is not None and allocation.kind == "device"


def memsetAsync(ptr, value, size, stream):
    with fake.machine.entered():
        queue = fake.machine.stream(stream)
        name = f"memsetAsync({ptr:#x}, {value}, {size})"
        fake.machine.queue(queue, name, lambda: ctypes.memset(ptr, value, size), lambda: ((), [(ptr, size)]))


def _whole_allocation(ptr):
    allocation = fake.machine.memory.starts(ptr)
    if allocation is None or allocation.kind != "device" or allocation.process != fake.machine.process:
        raise CUDARuntimeError(1)
    return allocation


# streams


def streamCreateWithFlags(flags):
    with fake.machine.entered():
        return fake.machine.new_stream(not flags & streamNonBlocking).pointer


def streamSynchronize(stream):
    with fake.machine.entered():
        fake.machine.synchronize(fake.machine.stream(stream).last)


def streamQuery(stream):
    with fake.machine.entered():
        return 0 if fake.machine.query(fake.machine.stream(stream).last) else 600


def streamWaitEvent(stream, event, flags=0):
    with fake.machine.entered():
        which = _event(event)
        if which.counters is not None and which.counters.is_foreign:
            counters, number = which.counters, which.counters.recorded
            name = f"wait for record {number} of another process's event {event:#x}"
            fake.machine.queue(fake.machine.stream(stream), name, ready=lambda: counters.reached(number))
        elif which.record is not None:
            fake.machine.queue(fake.machine.stream(stream), f"wait for {which.record.name}", after=[which.record])


# events


def eventCreateWithFlags(flags):
    with fake.machine.entered():
        if flags & eventInterprocess and not flags & eventDisableTiming:
            raise CUDARuntimeError(1)
        handle = fake.machine.new_handle()
        is_shared = flags & eventInterprocess and fake.machine.one_process
        fake.machine.events[handle] = Event(flags, getDevice(), processes.Counters() if is_shared else None)
        return handle


def eventRecord(event, stream):
    with fake.machine.entered():
        queue, which = fake.machine.stream(stream), _own_event(event)
        if which.device != queue.device:
            raise CUDARuntimeError(400)
        done = None if which.counters is None else which.counters.record()
        which.record = fake.machine.queue(queue, f"record of event {event:#x}", done)


def eventQuery(event):
    with fake.machine.entered():
        return 0 if fake.machine.query(_own_event(event).record) else 600


def eventSynchronize(event):
    with fake.machine.entered():
        fake.machine.synchronize(_own_event(event).record)


def eventElapsedTime(start, end):
    """The emulator's time, which is no GPU's."""
    with fake.machine.entered():
        events = _own_event(start), _own_event(end)
        if any(each.record is None or each.flags & eventDisableTiming for each in events):
            raise CUDARuntimeError(400)
        if not all(each.record.done for each in events):
            raise CUDARuntimeError(600)
        return 1e3 * (events[1].record.ran_s - events[0].record.ran_s)


def eventDestroy(event):
    with fake.machine.entered():
        which = _event(event)
        del fake.machine.events[event]
        if which in fake.machine.exported:
            fake.machine.exported.remove(which)
        if which.counters is not None:
            which.counters.memory.close()


def _event(pointer):
    try:
        return fake.machine.events[pointer]
    except KeyError:
        raise CUDARuntimeError(400) from None


def _own_event(pointer):
    """One that was made in this process; what else could be done with others is not in this fake."""
    event = _event(pointer)
    if event.counters is not None and event.counters.is_foreign:
        raise CUDARuntimeError(801)
    return event


# between processes: threads that stand for them, or real ones


def ipcGetMemHandle(devPtr):
    with fake.machine.entered():
        _check_ipc()
        allocation = _whole_allocation(devPtr)
        if allocation.shared is not None:
            return processes.handle("memory", allocation.shared, allocation.device)
        return _handle("memory", allocation)


def ipcOpenMemHandle(handle, flags=cudaIpcMemLazyEnablePeerAccess):
    with fake.machine.entered():
        _check_ipc()
        process = fake.machine.process
        allocation = _foreign_memory(handle) if fake.machine.one_process else _opened("memory", handle)
        if allocation.freed_by or process in allocation.mapped:
            raise CUDARuntimeError(400)
        if process == allocation.process:
            raise CUDARuntimeError(201)
        if allocation.device != getDevice() and not deviceCanAccessPeer(getDevice(), allocation.device):
            raise CUDARuntimeError(217)
        allocation.mapped.add(process)
        if allocation.is_foreign:
            fake.machine.memory.add(allocation)
        return allocation.base


def ipcCloseMemHandle(devPtr):
    with fake.machine.entered():
        allocation, process = fake.machine.memory.starts(devPtr), fake.machine.process
        if allocation is None or process not in allocation.mapped:
            raise CUDARuntimeError(1)
        for use in [each for each in allocation.uses if each.operation.stream.process == process]:
            if not fake.machine.knows(use):
                fake.machine.races.append(f"{allocation} is unmapped by {process}, which has not waited for: {use}")
            allocation.uses.remove(use)
        allocation.mapped.remove(process)
        if allocation.is_foreign:
            fake.machine.memory.free(allocation, "ipcCloseMemHandle")


def ipcGetEventHandle(event):
    with fake.machine.entered():
        _check_ipc()
        if not _event(event).flags & eventInterprocess:
            raise CUDARuntimeError(400)
        if fake.machine.one_process:
            fake.machine.export(_own_event(event))
            return processes.handle("event", _event(event).counters.memory)
        return _handle("event", _event(event))


def ipcOpenEventHandle(handle):
    with fake.machine.entered():
        _check_ipc()
        pointer = fake.machine.new_handle()
        fake.machine.events[pointer] = _foreign_event(handle) if fake.machine.one_process else _opened("event", handle)
        return pointer


def _check_ipc():
    if fake.refuse_ipc:
        raise CUDARuntimeError(801)


def _foreign_memory(handle):
    place, nbytes, device = _parsed("memory", handle)
    shared = _mapped(lambda: processes.SharedMemory(nbytes, place))
    return Allocation(nbytes, "device", device, f"process {place[0]}", shared=shared, is_foreign=True)


def _foreign_event(handle):
    place, *_ = _parsed("event", handle)
    return Event(eventInterprocess | eventDisableTiming, getDevice(), _mapped(lambda: processes.Counters(place)))


def _parsed(kind, handle):
    try:
        told = processes.parsed(kind, handle)
    except (ValueError, struct.error):
        raise CUDARuntimeError(1) from None
    if told[0][0] == os.getpid():
        raise CUDARuntimeError(201)
    return told


def _mapped(open_it):
    try:
        return open_it()
    except OSError:  # the process is gone, or has freed it
        raise CUDARuntimeError(400) from None


def _handle(kind, what):
    handle = np.array([fake.machine.new_handle(), *range(1, 8)], np.uint64).tobytes()
    fake.machine.ipc[handle] = kind, what, fake.machine.knowledge
    return handle


def _opened(kind, handle):
    if len(handle) != HANDLE_BYTES or fake.machine.ipc.get(bytes(handle), ("",))[0] != kind:
        raise CUDARuntimeError(1)
    _, what, known = fake.machine.ipc[bytes(handle)]
    fake.machine.learn(known)  # who sends a handle sends it after what its host has waited for
    return what
