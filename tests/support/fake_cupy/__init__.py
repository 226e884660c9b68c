"""A stand-in for CuPy on machines without a GPU, which finds what a GPU would punish only now and then.

Device memory is host memory that host code cannot read; what is queued on a stream runs later, by NumPy or by kernels
compiled for the processor; every operation's reads and writes are checked against those of the others (memory.py).

    memory.py    addresses, and the search for races     cuda.py    cupy.cuda: Stream, Device, MemoryPointer, …
    machine.py   streams: when is what run               arrays.py  cupy.ndarray
    runtime.py   cupy.cuda.runtime                       raw.py     cupy.RawModule
    nccl.py      cupy.cuda.nccl                          processes.py   IPC between real processes

    with fake_cupy.checked("random", seed=3, device_count=2) as cupy:
        ...                        # at the end: no race, and all that is queued can run

`machine.device_count` and `machine.memory_bytes` may be changed while it runs; `machine.as_process("rank 1")` lets a
thread stand for another process. Ranks as threads (run_ranks) are told from their names. Ranks as processes each say
`checked(one_process=True)`: they map each other's memory, and wait for each other's events.
"""

import contextlib
import sys
import threading

import pytest

from tests.support.fake_cupy.machine import Machine

machine = Machine()
refuse_ipc = False
"""True: nothing can be mapped by another process."""
refuse_peers = False
"""True: no GPU can read another one's memory."""
emulator = None
"""What runs kernels, if not tests/support/emulated_cuda.py: an object with `emulate` and `accesses`."""

from tests.support.fake_cupy import arrays, cuda  # noqa: E402
from tests.support.fake_cupy.arrays import *  # noqa: E402, F403
from tests.support.fake_cupy.raw import RawKernel, RawModule  # noqa: E402

__all__ = ["RawKernel", "RawModule", "checked", "cuda", "get_default_memory_pool", *arrays.__all__]
__version__ = "14.2.0"
_pool = cuda.MemoryPool()


def get_default_memory_pool():
    return _pool


def modules():
    """What stands in sys.modules for an import of CuPy."""
    return {"cupy": sys.modules[__name__], "cupy.cuda": cuda} | {
        f"cupy.cuda.{name}": getattr(cuda, name) for name in ("runtime", "nccl")
    }


@contextlib.contextmanager
def checked(mode="lazy", seed=0, **sizes):
    """A fresh machine, which an import of CuPy finds. At the end all that is queued must have been able to run, and no
    race may have been found."""
    global machine, refuse_ipc, refuse_peers, emulator
    from ringreduce.arrays import cuda as cuda_runtime
    from ringreduce.gpu import ipc

    cuda_runtime.device.cache_clear()
    machine, refuse_ipc, refuse_peers, emulator = Machine(mode, seed, **sizes), False, False, None
    cuda.synchronized.clear()
    start = threading.Thread.start

    def start_and_tell(thread):
        thread.started_by = machine.process
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_and_tell)
        for name, module in modules().items():
            patch.setitem(sys.modules, name, module)
        if not machine.one_process:
            patch.setattr(ipc, "process", lambda: machine.process_number)
        try:
            yield sys.modules[__name__]
            with machine.entered():
                stuck = machine.run_all()
        except BaseException:
            print(*machine.races[:20], sep="\n")  # they may be why
            raise
        finally:
            machine.is_closed = True
            cuda_runtime.device.cache_clear()
    assert not machine.races, "\n".join(machine.races[:20])
    assert not stuck, f"never run: {'; '.join(map(str, stuck))}"
