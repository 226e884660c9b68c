"""A parameter server that adds up; a rank may be killed. Arguments: mode, rank, its step (0: never), output folder."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import ringreduce as rr

STEPS, SERVERS = 40, 2
mode, victim, at, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])


def die(step):
    """Where this rank is the victim."""
    if os.environ["RANK"] == str(victim) and step == at:
        os.kill(os.getpid(), signal.SIGKILL)


applied = 0


def add(parameters, gradients):
    """The rule; counts its calls."""
    global applied
    applied += 1
    die(applied)
    for name, gradient in gradients.items():
        parameters[name] += gradient


rr.init()
if rr.ps.is_server(SERVERS):
    server = rr.ps.Server(add, mode, 1 if mode == "ssp" else None, servers=SERVERS)
    served = server.serve()
    result = {"pushes": served.pushes, **{name: each.tolist() for name, each in served.parameters.items()}}
else:
    ones = {"a": np.ones((4, 3)), "b": np.ones(2)}
    with rr.ps.Worker({name: np.zeros_like(each) for name, each in ones.items()}, servers=SERVERS) as worker:
        began = worker.index
        for step in range(STEPS):
            time.sleep(0.002 * (1 + began))
            worker.pull()
            worker.push({name: each * (1 + began) for name, each in ones.items()})
            die(step + 1)
        found = worker.pull()
    result = {"index": [began, worker.index], "count": worker.count, "a": found["a"][3, 2], "b": found["b"][0]}
(folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
