"""Rank 2 dies when the others are ready to hear of it; they speak when they are ended for it."""

import os
import signal
import sys
import time
from pathlib import Path

rank = int(os.environ["RANK"])
signal.signal(signal.SIGTERM, lambda *_: (print("ended"), print("by", rank), sys.exit(1)))
print("begin")
ready = [Path(__file__).with_name(f"ready{number}") for number in range(2)]
if rank == 2:
    while not all(each.exists() for each in ready):
        time.sleep(0.01)
    print("dies")
    os.kill(os.getpid(), signal.SIGKILL)
ready[rank].touch()
time.sleep(60)
