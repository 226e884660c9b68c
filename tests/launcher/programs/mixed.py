"""Ranks 0 and 2 wait in MPI, rank 1 is stopped, rank 3 runs no Python any more."""

import os
import signal

from mpi4py import MPI

world = MPI.COMM_WORLD


def wait_in_mpi():
    world.Barrier()


world.Barrier()
open(f"up{world.rank}", "w").close()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if world.rank == 3:
    os.execvp("sleep", ["sleep", "60"])
wait_in_mpi()
