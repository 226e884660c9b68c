"""Ranks reduce, and say whether in shared memory, after what the arguments name has happened to them, if anything."""

import ctypes
import errno
import os
import signal
import struct
import sys
import threading

import numpy as np

import ringreduce as rr


def taken_meanwhile(reserve=os.posix_fallocate):
    def reserve_after_another_job(*arguments):
        if os.environ["RANK"] == "1":
            with open("/dev/shm/another_jobs", "wb") as file:
                file.write(bytes(10 << 20))
        reserve(*arguments)

    os.posix_fallocate = reserve_after_another_job


def in_a_container():
    if os.environ["RANK"] == "1" and "INSIDE" not in os.environ:
        os.environ["INSIDE"] = "yes"
        flags = ["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        os.execvp("unshare", ["unshare", *flags, sys.executable, *sys.argv])


def forbidden():
    """As by the filter of a container: reading another process's memory (CMA) is not permitted."""
    load, equal, end, refused, allowed = 0x20, 0x15, 0x06, 0x50000 | errno.EPERM, 0x7FFF0000
    steps = [(load, 0, 0, 0), (equal, 1, 0, 310), (equal, 0, 1, 311), (end, 0, 0, refused), (end, 0, 0, allowed)]
    rules = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    filter_ = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(rules))
    assert libc.prctl(22, 2, filter_, 0, 0) == 0, ctypes.get_errno()
    assert libc.process_vm_readv(1, None, 0, None, 0, 0) == -1
    assert ctypes.get_errno() == errno.EPERM


def killed(seconds):
    """Rank 1, in this or another reduction."""
    rr.init()
    assert "shared" in rr.info().usable_algorithms
    if rr.rank() == 1:
        threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
    array = np.ones(2_000_000, np.float32)
    while True:
        rr.allreduce_(array)


if len(sys.argv) > 1:
    globals()[sys.argv[1]](*sys.argv[2:])
rr.init()
for count in (3, 1_000_003):
    mean = rr.allreduce(np.arange(count, dtype=np.float32) + 2 * rr.rank())
    np.testing.assert_array_equal(mean, np.arange(count, dtype=np.float32) + rr.size() - 1)
print("right;", "shared" in rr.info().usable_algorithms, rr.info().shared_memory_bytes)
