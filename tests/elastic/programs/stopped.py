"""Rank 0 is stopped in shutdown(), rank 2 comes late."""

import os
import signal
import threading
import time

import ringreduce as rr
from ringreduce import runtime


def stop():
    while not engine.negotiation.leaving:
        time.sleep(0.01)
    time.sleep(0.3)
    open("stopping", "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)


rr.init()
engine = runtime.current("this test").engine
rr.barrier()
if rr.rank() == 0:
    threading.Thread(target=stop, daemon=True).start()
if rr.rank() == 2:
    while not os.path.exists("stopping"):
        time.sleep(0.01)
    time.sleep(0.5)
rr.shutdown()
print("left")
