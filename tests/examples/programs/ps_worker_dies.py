"""Worker 1 of a parameter server is killed between two steps."""

import os
import signal

import numpy as np

import ringreduce as rr

rr.init()
if rr.ps.is_server():
    rr.ps.Server(lambda parameters, gradients: None, "async").serve()
else:
    with rr.ps.Worker({"w": np.zeros(3)}) as worker:
        for step in range(1000):
            if worker.index == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            worker.push(worker.pull())
