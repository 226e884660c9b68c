"""May a process that a rank's first one has started have joined other ranks? Of the first one the hook tells.

ringreduce and torch say so in every process. MPI and JAX do not, nor does TensorFlow, and the hook is not in children:
the kernel is asked, now and then, what these have loaded. A data loader's worker may have loaded JAX, too, but has no
TCP connection of its own.
"""

import contextlib
import os
import threading
import time
from pathlib import Path

from ..processes import in_session

_SHORTEST_S, _LONGEST_S = 0.05, 2.0
_GROWS = 100  # between two looks lies this part of the time since the start
_REST = 50  # and at least so often the CPU time of a look, which takes longer where there are many processes
_MPI = b"/libmpi"
_OTHERS = (b"/jaxlib/", b"/tensorflow/")
_ESTABLISHED = "01"
_STATE, _INODE = 3, 9  # columns of /proc/net/tcp


class JoinWatch:
    """One agent's, for the rank whose first process is `first`."""

    def __init__(self) -> None:
        self.may_have_joined = False
        """Whether such a process was seen."""
        self.is_known = False
        """The rank has said that it has joined others: nobody need look."""

    def start(self, first: int) -> None:
        """Look now and then, in a thread, until it is known."""
        threading.Thread(target=self._watch, args=(first,), daemon=True).start()

    def _watch(self, first: int) -> None:
        start_s = time.monotonic()
        while not (self.is_known or self.may_have_joined):
            began_s = time.thread_time()
            self.look(first)
            pause_s = min(_LONGEST_S, (time.monotonic() - start_s) / _GROWS)
            time.sleep(max(_SHORTEST_S, pause_s, _REST * (time.thread_time() - began_s)))

    def look(self, first: int) -> None:
        """Look once."""
        with contextlib.suppress(OSError):  # as where no descriptor is free
            self.may_have_joined |= any(_may_have_joined(pid, first) for pid in in_session(first) if pid != first)


def _may_have_joined(pid: int, first: int) -> bool:
    loaded = _maps(pid)
    if _MPI in loaded:
        return _MPI not in _maps(first)  # as a fork has what its parent has
    return any(name in loaded for name in _OTHERS) and bool(_connections(pid) - _connections(first))


def _maps(pid: int) -> bytes:
    with contextlib.suppress(OSError):  # it is gone
        return Path(f"/proc/{pid}/maps").read_bytes()
    return b""


def _connections(pid: int) -> set[str]:
    """Return what a process has open of the TCP connections of its network."""
    established, opened = set(), set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = map(str.split, Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:])
            established |= {f"socket:[{row[_INODE]}]" for row in rows if row[_STATE] == _ESTABLISHED}
    with contextlib.suppress(OSError):
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                opened.add(os.readlink(descriptor.path))
    return established & opened
