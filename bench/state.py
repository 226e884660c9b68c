"""The state of a host's cores: whether they share a cache, and how fast a copy is. Without it no figure says much.

Virtual cores move from one chip of a processor to another within minutes, so jobs measure it before and after.
On AMD EPYC a flag's round trip takes 100 to 135 ns between cores of one chip (near), 440 to 530 between two (far).
"""

from __future__ import annotations

import ctypes
import functools
import math
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import neutral, rest

import ringreduce as rr

LIMIT_S = 0.2
LINE_BYTES = 64
COPIED_BYTES = 64 << 20  # which no second-level cache holds
COPIES = 5


def state() -> dict[str, Any]:
    """What all ranks measure together, equal on all of them.

    round_trip_ns: the best between the first rank and each other one of its host; None where there is no compiler, or
                   the two never ran at once for long enough
    copy_gbs:      how many GB each rank copies a second, all at the same time: the best of the slowest rank
    stores:        how large all-reduces write now (`rr.info().stores`), by rank
    """
    return {
        "round_trip_ns": _round_trips(),
        "copy_gbs": round(_copy_gbs(), 2),
        "stores": neutral().allgather(rr.info().stores if rr.is_initialized() else ""),
    }


@functools.cache
def _compiled() -> Any:
    """state.c's function; None without a compiler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.so")
        command = ["cc", "-O2", "-shared", "-fPIC", str(Path(__file__).with_suffix(".c")), "-o", str(path)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        function = ctypes.CDLL(str(path)).round_trip_ns
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_double]
    return function


def _round_trips() -> list[float | None]:
    from mpi4py import MPI

    function = _compiled()
    comm = neutral()
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    window = MPI.Win.Allocate_shared(LINE_BYTES * host.size if host.rank == 0 else 0, 1, comm=host)
    lines = np.frombuffer(window.Shared_query(0)[0], np.int64).reshape(host.size, -1)
    found: list[float | None] = []
    for other in range(1, host.size):
        lines[host.rank] = 0
        host.Barrier()
        best = math.inf
        if function is not None and host.rank in (0, other):
            mine, others = (0, other) if host.rank == 0 else (other, 0)
            best = function(lines[mine].ctypes.data, lines[others].ctypes.data, host.rank == 0, LIMIT_S * 1e9)
        best = host.bcast(best)
        found.append(round(best, 1) if math.isfinite(best) else None)
    window.Free()
    host.Free()
    return list(comm.bcast(found))


def _copy_gbs() -> float:
    source, target = np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)
    times = []
    for _ in range(COPIES):
        rest()
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    slowest = max(neutral().allgather(min(times)))
    return COPIED_BYTES / slowest / 1e9
