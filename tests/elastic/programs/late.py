"""One rank is stopped and another busy, while the last awaits them in shutdown() or at its end."""

import os
import signal
import sys
import time

import ringreduce as rr

rr.init()
rr.barrier()
if rr.rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGSTOP)
elif rr.rank() == 1 - int(sys.argv[1]):
    time.sleep(7.0)  # as one that saves a checkpoint
if "ends" not in sys.argv:
    rr.shutdown()
print("left")
