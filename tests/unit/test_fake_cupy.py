"""The fake CuPy finds what it is there to find, in every mode, and lets right programs pass."""

import contextlib

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.arrays.cuda import Block, Pinned, Stream, device
from ringreduce.gpu.ipc import Slots
from ringreduce.settings import Settings
from ringreduce.testing import run_ranks
from ringreduce.transport.window import PACKED, SUMMED
from tests.support import tiers

pytestmark = tiers.extended

N = 1000


@pytest.fixture
def any_mode(cupy_of_every_mode):
    """Two GPUs; the check at the end is for right programs."""
    cupy_of_every_mode.machine.device_count = 2
    return cupy_of_every_mode


def races(fake):
    """What was found until now and by running the rest; taken, so that the check at the end finds none."""
    with fake.machine.entered():
        assert fake.machine.run_all() == []
    found, fake.machine.races = fake.machine.races, []
    return found


def filled(value, stream):
    block = Block(device(0), 4 * N)
    array = block.elements(np.dtype(np.float32), 0, block.nbytes)
    with stream:
        array[...] = value
    return block, array


def two_streams():
    return Stream(device(0)), Stream(device(0))


# the three hazards, with and without a wait


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("before", ["read", "write"])
def test_writing_what_another_stream_reads_or_writes(any_mode, before, waits):
    one, writer = two_streams()
    block, _ = filled(1, one)
    early = one.record()
    if before == "read":
        one.copy(Block(device(0), 4 * N).pointer, block.pointer, 4 * N)
        writer.wait(one.record() if waits else early)  # the event before the copy is not enough
    elif waits:
        writer.wait(early)
    any_mode.cuda.runtime.memsetAsync(block.pointer + 4 * (N - 1), 0, 4, writer.pointer)
    found = races(any_mode)
    assert len(found) == (0 if waits else 1)
    assert waits or found[0].startswith("no order between: ")


@pytest.mark.parametrize("waits", [True, False])
def test_reading_what_another_stream_writes(any_mode, waits):
    writer, reader = two_streams()
    block, _ = filled(3, writer)
    result = Block(device(0), 4 * N)
    if waits:
        reader.wait(writer.record())
    reader.copy(result.pointer, block.pointer, 4 * N)
    with reader:
        copied = result.elements(np.dtype(np.float32), 0, result.nbytes).get()
    found = races(any_mode)
    assert copied.tolist() == [3.0] * N or not waits
    memory = f"{4 * N} bytes at {block.pointer:#x}"
    told = ["assignment (number 1 on stream 1 of main, GPU 0)", f"writes {memory}", "memcpyAsync(", f"reads {memory}"]
    assert [all(part in each for part in told) for each in found] == [True] * (not waits)


# what the host has waited for


@pytest.mark.parametrize("wait", ["synchronize", "done", "nothing"])
def test_the_host_waits_for_one_stream_and_queues_on_another(any_mode, wait):
    one, other = two_streams()
    _, array = filled(1, one)
    event = one.record()
    if wait == "synchronize":
        one.synchronize()
    while wait == "done" and not event.done():
        pass
    with other:
        array[...] = 2
    assert len(races(any_mode)) == (1 if wait == "nothing" else 0)


def test_another_process_does_not_know_what_the_host_of_this_one_has_waited_for(any_mode):
    runtime = any_mode.cuda.runtime
    for told in (True, False):
        with any_mode.machine.as_process("rank 0"):
            block, _ = filled(1, stream := Stream(device(0)))
            event = runtime.eventCreateWithFlags(runtime.eventDisableTiming | runtime.eventInterprocess)
            runtime.eventRecord(event, stream.pointer)
            handles = runtime.ipcGetMemHandle(block.pointer), runtime.ipcGetEventHandle(event)
            runtime.eventSynchronize(event)
        with any_mode.machine.as_process("rank 1"):
            stream = Stream(device(0))
            address = runtime.ipcOpenMemHandle(handles[0])
            if told:
                runtime.streamWaitEvent(stream.pointer, runtime.ipcOpenEventHandle(handles[1]))
            runtime.memsetAsync(address, 0, 16, stream.pointer)
        assert len(races(any_mode)) == (0 if told else 1)


# memory


def test_memory_of_an_array_that_is_gone_belongs_to_the_stream_that_made_it(any_mode):
    for waits in (True, False):
        stream, user = two_streams()
        with stream:
            array = any_mode.full(N, 4, np.float32)
        user.wait(stream.record())
        with user:
            copied = array.copy()
        if waits:
            stream.wait(user.record())
        del array
        found = races(any_mode)
        assert len(found) == (0 if waits else 1)
        assert waits or "the reuse of memory whose array is gone" in found[0] or "freed by its pool" in found[0]
        del copied
        user.synchronize()


def test_freed_memory_is_not_used(any_mode):
    runtime = any_mode.cuda.runtime
    block = Block(device(0), 64)
    block.free()
    runtime.memsetAsync(block.pointer, 0, 64, 0) if any_mode.machine.mode == "lazy" else None
    if any_mode.machine.mode == "lazy":
        with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):
            runtime.streamSynchronize(0)
        (message,) = races(any_mode)
        assert "was freed by cudaFree" in message
    with pytest.raises(runtime.CUDARuntimeError) as raised:
        block.free()
    assert raised.value.status == 1, "a double free"


def test_host_memory_must_be_pinned(any_mode):
    runtime = any_mode.cuda.runtime
    block, stream, host = Block(device(0), 64), Stream(device(0)), np.zeros(64, np.uint8)
    with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):  # noqa: PT012
        stream.copy(block.pointer, host.ctypes.data, 64)
        stream.synchronize()
    assert "neither a GPU's memory nor pinned memory" in races(any_mode)[0]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("what", ["changed", "given back"])
def test_pinned_memory_stays_as_it_is_until_its_copy_has_run(cupy, what, waits):
    block, stream, pinned = Block(device(0), 64), Stream(device(0)), Pinned(64)
    stream.copy(block.pointer, pinned.pointer, 64)
    if waits:
        stream.synchronize()
    if what == "changed":
        pinned.array[5] += 1
    else:
        del pinned
    if waits:
        assert races(cupy) == []
        return
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
        stream.synchronize()
    told = {"changed": "was changed before its copy ran", "given back": "was freed by the pool of pinned memory"}
    assert any(told[what] in each for each in races(cupy))


# between processes


def test_memory_of_another_process_must_be_mapped_and_unmapped_in_time(any_mode):
    runtime = any_mode.cuda.runtime
    machine = any_mode.machine
    with machine.as_process("rank 0"):
        block = Block(device(0), 64)
        handle = runtime.ipcGetMemHandle(block.pointer)
        with pytest.raises(runtime.CUDARuntimeError) as raised:
            runtime.ipcGetMemHandle(block.pointer + 16)
        assert raised.value.status == 1, "not where the memory begins"
        with pytest.raises(runtime.CUDARuntimeError) as raised:
            runtime.ipcOpenMemHandle(handle)
        assert raised.value.status == 201, "its own"
    with machine.as_process("rank 1"):
        stream = Stream(device(0))
        with pytest.raises(runtime.CUDARuntimeError, match="IllegalAddress"):  # noqa: PT012
            runtime.memsetAsync(block.pointer, 0, 64, stream.pointer)
            stream.synchronize()
        assert "is not mapped in rank 1" in races(any_mode)[0]
        assert runtime.ipcOpenMemHandle(handle) == block.pointer
        runtime.memsetAsync(block.pointer, 0, 64, stream.pointer)
        stream.synchronize()
    with machine.as_process("rank 0"):
        block.free()
        assert any("is freed while rank 1 has it mapped" in each for each in machine.races)
        machine.races.clear()


# arrays


def test_the_host_cannot_read_device_memory(any_mode):
    array = any_mode.asarray(np.arange(6.0))
    for forbidden in (np.asarray, np.sum, bool, bytes, memoryview, lambda each: each + np.ones(6)):
        with pytest.raises(TypeError):
            forbidden(array)
    with pytest.raises(TypeError, match="host memory assigned to device memory"):
        array[...] = np.ones(6)


# a whole program


@pytest.mark.parametrize("forgotten", [None, PACKED, SUMMED, "slots"])
def test_every_wait_that_an_allreduce_forgets_is_found(cupy_of_every_mode, monkeypatch, forgotten):
    """Through the slots of three ranks (ringreduce/gpu/ipc.py); with one slot, a rank packs what others still copy."""
    fake, follow = cupy_of_every_mode, Slots.follow
    monkeypatch.setattr(Slots, "follow", lambda *args: None if args[1] == forgotten else follow(*args))
    if forgotten == "slots":
        monkeypatch.setattr(Slots, "addresses", lambda peers, sequence: list(peers._memory))

    def program():
        arrays = [fake.arange(600, dtype=np.float32) * (rr.rank() + 1) + step for step in range(12)]
        return [rr.allreduce(each, op=rr.Sum).get() for each in arrays]

    settings = Settings(cuda_slot_bytes=1024, cuda_nccl=False)
    for results in run_ranks(3, program, settings=settings, timeout_s=60):
        for step, result in enumerate(results if forgotten is None else []):
            np.testing.assert_array_equal(result, np.arange(600) * 6 + 3 * step)
    assert any("no order between" in each for each in races(fake)) == (forgotten is not None)
