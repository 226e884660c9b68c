"""The fake CuPy between real processes: whose memory is seen, when what is run, and what is found to be wrong."""

import subprocess
import sys

import pytest

from tests.support import fake_cupy, tiers
from tests.support.jobs import ROOT

pytestmark = tiers.extended

NBYTES = 1 << 12


class Child:
    """Another process with the fake: it evaluates expressions."""

    def __init__(self, mode):
        command = [sys.executable, "-m", "tests.unit.programs.evaluates", mode]
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, expression):
        self.process.stdin.write(f"{expression}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def read(self, stream, address):
        """The first byte there, when what is queued on a stream is done."""
        self(f"runtime.memcpyAsync(host.ptr, {address}, 1, 4, {stream})")
        self(f"runtime.streamSynchronize({stream})")
        return int(self("host[0]"))


@pytest.fixture
def fake():
    with fake_cupy.checked(one_process=True) as fake:
        yield fake


@pytest.fixture(params=["lazy", "eager", "random"])
def child(request):
    child = Child(request.param)
    child("globals().update(host=fake.cuda.alloc_pinned_memory(8))")
    yield child
    child.process.stdin.close()
    assert child.process.wait(20) == 0
    child.process.stdout.close()


@pytest.fixture
def memory(fake):
    """An allocation, and the handle by which it is mapped."""
    address = fake.cuda.runtime.malloc(NBYTES)
    return address, fake.cuda.runtime.ipcGetMemHandle(address)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_waits_for_another_processs_event(fake, child, memory, waits):
    """Nothing runs here before somebody wants it: who does not wait reads what was there before."""
    runtime, (address, handle) = fake.cuda.runtime, memory
    event = runtime.eventCreateWithFlags(runtime.eventInterprocess | runtime.eventDisableTiming)
    opened = int(child(f"runtime.ipcOpenEventHandle({runtime.ipcGetEventHandle(event)})"))
    mapped = int(child(f"runtime.ipcOpenMemHandle({handle})"))
    for value in (3, 4):
        runtime.memsetAsync(address, value, NBYTES, 0)
        runtime.eventRecord(event, 0)
        if waits:
            child(f"runtime.streamWaitEvent(0, {opened})")
        assert child.read(0, mapped) == (value if waits else 0xCD)
    child(f"runtime.ipcCloseMemHandle({mapped})")


def test_memory_that_is_freed_while_another_process_has_it_mapped(fake, child, memory):
    runtime, (address, handle) = fake.cuda.runtime, memory
    child(f"runtime.ipcOpenMemHandle({handle})")
    runtime.free(address)
    (race,) = fake.machine.races
    assert "is freed while another process has it mapped" in race
    fake.machine.races.clear()


def test_what_was_unmapped_is_not_touched(fake, child):
    told = child("runtime.malloc(4096)")
    mapped = fake.cuda.runtime.ipcOpenMemHandle(eval(child(f"runtime.ipcGetMemHandle({told})")))
    fake.cuda.runtime.ipcCloseMemHandle(mapped)
    with pytest.raises(fake.cuda.runtime.CUDARuntimeError, match="illegal memory access"):
        fake.cuda.runtime.memsetAsync(mapped, 0, 1, 0) or fake.cuda.runtime.streamSynchronize(0)
    assert "was freed by ipcCloseMemHandle" in fake.machine.races.pop()
