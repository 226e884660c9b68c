"""Writes its process number to up<rank>, and ends with code 9 when it has got both SIGUSR1 and SIGUSR2."""

import os
import pathlib
import signal
import sys
import time

from mpi4py import MPI

got = []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: got.append(number))
MPI.COMM_WORLD.Barrier()
pathlib.Path(f"up{MPI.COMM_WORLD.rank}").write_text(str(os.getpid()))
while set(got) != {signal.SIGUSR1, signal.SIGUSR2}:
    time.sleep(0.01)
sys.exit(9)
