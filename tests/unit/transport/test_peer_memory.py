"""Another process's memory: many places, long ones, and what cannot be read."""

import os
import subprocess
import sys

import numpy as np
import pytest

from ringreduce.transport import peer_memory

PROGRAM = """
import numpy as np
arrays = [np.arange(k, k + length, dtype=np.int16) for k, length in enumerate({lengths})]
print([each.ctypes.data for each in arrays], flush=True)
input()
"""
LENGTHS = [0, 1, 999, 0, 3, *[2, 5] * 1100]


@pytest.fixture
def other():
    """A process, and the places of its arrays."""
    command = [sys.executable, "-c", PROGRAM.format(lengths=LENGTHS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        addresses = eval(process.stdout.readline())
        yield process, np.array([(a, 2 * n) for a, n in zip(addresses, LENGTHS, strict=True) if n], np.int64)
        process.kill()


@pytest.mark.parametrize("most_bytes", [1 << 30, 1998, 2001])
def test_places_by_the_thousand_are_read_each_to_its_own(other, most_bytes, monkeypatch):
    """In calls of so many bytes at most, and of 1024 places, which is what the kernel takes."""
    monkeypatch.setattr(peer_memory, "MOST_BYTES", most_bytes)
    process, theirs = other
    arrays = [np.full(length, -1, np.int16) for length in LENGTHS]
    assert peer_memory.read(process.pid, theirs, peer_memory.places(arrays))
    for k, each in enumerate(arrays):
        assert each.tolist() == list(range(k, k + LENGTHS[k]))


def test_long_arrays_are_several_places(monkeypatch):
    monkeypatch.setattr(peer_memory, "MOST_BYTES", 100)
    short, long, none = np.zeros(100, np.uint8), np.zeros(201, np.uint8), np.zeros(0)
    at = long.ctypes.data
    expected = [[short.ctypes.data, 100], [at, 100], [at + 100, 100], [at + 200, 1]]
    assert peer_memory.places([short, none, long, none]).tolist() == expected
    assert peer_memory.places([none]).shape == (0, 2)


def test_what_cannot_be_read_is_told(other, monkeypatch):
    """Memory that is not there, also behind some that is; a process that has ended; a system without the call."""
    process, theirs = other
    arrays = [np.zeros(length, np.int16) for length in LENGTHS]
    own = peer_memory.places(arrays)
    for wrong in (0, 1023, 1024, len(theirs) - 1):
        places = theirs.copy()
        places[wrong, 0] = 8
        assert not peer_memory.read(process.pid, places, own)
    process.kill()
    process.wait()
    assert not peer_memory.read(process.pid, theirs, own)
    monkeypatch.setattr(peer_memory, "_call", lambda: None)
    assert not peer_memory.read(os.getpid(), own, own)
    assert peer_memory.read(os.getpid(), own[:0], own[:0])
