"""A host's last commits, in files in memory: from these a job goes on that ringrun starts again.

    FOLDER/0.a, FOLDER/0.b      of a process' first State, written in turns: the last commit and the one before

    | number, bytes of the arrays, bytes of the rest | arrays, from byte 64 on | all but the arrays, pickled |

The files outlive every process of the job. While one is written its number is 0, and it counts for nothing; so the
other one is whole whenever a rank dies. One rank of each host writes, the lowest of the world: all have equal states.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_HEADER = struct.Struct("=3q")
_ARRAYS_AT = 64


class Found(NamedTuple):
    """A commit that was read from a file."""

    number: int
    rest: Any  # all but the arrays
    memory: Any  # the bytes of the arrays, in memory of this process' own


class KeptFile:
    """One of the two files. What it may raise: OSError, such as for want of room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self.memory = np.empty(0, np.uint8)
        """The bytes of the arrays."""
        self.has_failed = False

    @property
    def number(self) -> int:
        """The commit's; 0: there is none, or it is not whole."""
        try:
            with self.path.open("rb") as file:
                return self._header(file.read(_HEADER.size))[0]
        except OSError:
            return 0

    def begin(self, nbytes: int) -> None:
        """What the file has counts no more; have `memory` for so many bytes of arrays."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(self._descriptor, _HEADER.pack(0, 0, 0), 0)
        if self.memory.nbytes != nbytes or not nbytes:
            os.posix_fallocate(self._descriptor, 0, _ARRAYS_AT + nbytes)  # else a write without room is a bus error
            mapped = mmap.mmap(self._descriptor, _ARRAYS_AT + nbytes)
            self.memory = np.frombuffer(mapped, np.uint8)[_ARRAYS_AT:]

    def finish(self, number: int, rest: Any) -> None:
        """`memory` is filled; with the rest this is commit `number`."""
        left = memoryview(pickle.dumps(rest))
        at, header = _ARRAYS_AT + self.memory.nbytes, _HEADER.pack(number, self.memory.nbytes, len(left))
        os.posix_fallocate(self._descriptor, at, len(left))  # fails without room, where a write only stops short
        while left:
            written = os.pwrite(self._descriptor, left, at)  # 2 GiB at most
            at, left = at + written, left[written:]
        os.pwrite(self._descriptor, header, 0)

    def read(self) -> Found | None:
        """The commit, if it is whole."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            header = file.read(_HEADER.size)
            number, nbytes, length = self._header(header)
            file.seek(_ARRAYS_AT)
            memory, rest = np.fromfile(file, np.uint8, nbytes), file.read(length)
            file.seek(0)
            is_whole = file.read(_HEADER.size) == header and (memory.nbytes, len(rest)) == (nbytes, length)
            if number and is_whole:
                return Found(number, pickle.loads(rest), memory)  # noqa: S301 - of this job, in a private folder
        return None

    def fail(self) -> None:
        """It counts no more, and its room is free once `memory` is."""
        self.has_failed = True
        with contextlib.suppress(OSError):
            self.path.unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self.memory = -1, np.empty(0, np.uint8)

    def _header(self, begin: bytes) -> tuple[int, int, int]:
        number, nbytes, length = _HEADER.unpack(begin) if len(begin) == _HEADER.size else (0, 0, 0)
        return number, nbytes, length


class Kept:
    """The two files of state number `state` of a process; nothing is opened before it is asked for."""

    def __init__(self, folder: str, state: int) -> None:
        self._files = [KeptFile(Path(folder, f"{state}.{name}")) for name in "ab"]

    def next(self, after: KeptFile | None) -> KeptFile | None:
        """The file to write after that one: the older of the others; None once one has failed."""
        if any(file.has_failed for file in self._files):
            return None
        return min((file for file in self._files if file is not after), key=lambda file: file.number)

    def newest(self) -> Found | None:
        """The newest commit that is whole."""
        found = [file.read() for file in self._files]
        return max((each for each in found if each), key=lambda each: each.number, default=None)
