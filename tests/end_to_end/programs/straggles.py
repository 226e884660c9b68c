"""Steps of which one rank, or a host, is late in each: `straggles.py KIND [HOST]`."""

import os
import socket
import subprocess
import sys
import time

import numpy as np

import ringreduce as rr

STEPS, LATE_S, COMPUTES_S = 150, 0.02, 0.03
OTHERS, STEPS_BESIDE_THEM = 4, 50
"""On the core of the rank that shares it, beside as many as want a core of this machine anyway."""
BYTES = 400_000


class Examples:
    """One takes a rank longer to load."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        time.sleep(LATE_S * (rr.rank() == 1))
        return index


def rounds(count):
    """Compute, on a core."""
    x = 1.0
    for _ in range(count):
        x = x * 0.5 + 1
    return x


def rounds_in(seconds):
    """How many take that long on a core of one's own."""
    best_s = min(timed(200_000) for _ in range(5))
    return int(200_000 * seconds / best_s)


def timed(count):
    begin_s = time.perf_counter()
    rounds(count)
    return time.perf_counter() - begin_s


def examples(kind):
    if kind != "loader":
        return range(STEPS_BESIDE_THEM if kind == "core" else STEPS)
    from torch.utils.data import DataLoader

    return DataLoader(Examples(), batch_size=None)


def main(kind, host=""):
    rr.init()
    count = rounds_in(COMPUTES_S) if kind == "core" else 0
    busy = []
    for _ in range(OTHERS + int(os.getloadavg()[0]) if kind == "core" and rr.rank() == 1 else 0):
        busy.append(subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True))
        os.sched_setaffinity(busy[-1].pid, os.sched_getaffinity(0))
    for _ in examples(kind):
        if kind == "core":
            rounds(count)
        else:
            time.sleep(COMPUTES_S)
        if (kind == "rank" and rr.rank() == 1) or (kind == "host" and socket.gethostname() == host):
            time.sleep(LATE_S)
        rr.allreduce(np.full(BYTES // 4, rr.rank(), np.float32), name="gradient")
        rr.mark_step()
    for each in busy:
        each.kill()
    rr.shutdown()


main(*sys.argv[1:])
