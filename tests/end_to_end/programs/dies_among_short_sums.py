"""The rank of the argument is killed at any moment of one of many short sums that all ranks call by name."""

import os
import signal
import sys
import threading
import time

import numpy as np

import ringreduce as rr

rr.init()
array = np.ones(64, np.float32)
for number in range(10**7):
    if number == 500 and rr.rank() == int(sys.argv[1]):
        print("failing at", time.time(), flush=True)
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    array[:] = number % 100
    assert rr.allreduce_(array, name="w")[0] == number % 100
