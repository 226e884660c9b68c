"""A sweep that logs its trials; of these some raise, and some wait for a file."""

import json
import sys
import time
from pathlib import Path

import ringreduce as rr

storage, log, go_on, (failing, held) = *sys.argv[1:4], json.loads(sys.argv[4])


def objective(trial):
    x, team = trial.suggest_float("x", 0, 1), trial.process_set

    def record(event):
        if team.rank() == 0:
            with open(log, "a") as file:
                file.write(json.dumps([event, trial.number, x, team.ranks]) + "\n")

    record("began")
    while trial.number in held and not Path(go_on).exists():
        time.sleep(0.05)
    for _ in range(5):
        rr.allreduce(x, name="x", process_set=team)
    if trial.number in failing:
        raise ValueError("on purpose")
    record("ended")
    return x


rr.init()
found = rr.sweep(objective, 16, 2, storage=storage)
if rr.rank() == 0:
    print(json.dumps([each._asdict() for each in found.trials]))
