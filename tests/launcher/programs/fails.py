"""Rank 1 does what the statements in argv[1] say, 0.3 s after all have met; the others wait for it in a barrier."""

import sys
import time

from mpi4py import MPI

world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 1:
    time.sleep(0.3)
    open("failed", "w").close()
    exec(sys.argv[1])
world.Barrier()
