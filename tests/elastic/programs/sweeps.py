"""A sweep of which a rank dies in its second trial."""

import os
import signal
import sys
import time

import numpy as np

import ringreduce as rr

tried = []


def objective(trial):
    rate, team = trial.suggest_float("rate", 0.1, 1), trial.process_set
    tried.append(trial.number)
    for step in range(10):
        found = rr.allreduce(np.full(3, rate), name="w", process_set=team)
        if len(tried) == 2 and step == 5 and os.environ["RANK"] == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    return float(found[0])


rr.init()
search = rr.elastic.run(lambda state: rr.sweep(objective, trials=9, ranks=int(sys.argv[3]), storage=sys.argv[1]))
found = search(rr.elastic.ObjectState())
print("ranks", rr.size(), "trials", [each.number for each in found.trials], {each.state for each in found.trials})
