"""Rank 2 dies; the others speak when they are ended for it."""

import os
import signal
import sys
import time

rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: (print("ended"), print("by", rank), sys.exit(1)))
print("begin")
if rank == 2:
    print("dies")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
