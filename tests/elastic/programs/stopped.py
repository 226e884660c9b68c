"""A rank is stopped in shutdown(), or `early`: before the others leave, which then do so at their ends."""

import os
import signal
import sys
import threading
import time

import ringreduce as rr
from ringreduce import runtime

is_early = "early" in sys.argv


def stop():
    while not is_early and not engine.ending.leaving:
        time.sleep(0.01)
    time.sleep(0.3)
    open("stopping", "w").close()
    os.kill(os.getpid(), signal.SIGSTOP)


rr.init()
engine = runtime.current("this test").engine
rr.barrier()
if rr.rank() == int(sys.argv[1]):
    stop() if is_early else threading.Thread(target=stop, daemon=True).start()
if rr.rank() == 2:
    while not os.path.exists("stopping"):
        time.sleep(0.01)
    time.sleep(0.5)
if not is_early:
    rr.shutdown()
print("left")
