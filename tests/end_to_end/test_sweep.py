"""A sweep on real ranks that is killed altogether, and goes on where it was."""

import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import jobs
from tests.jobs import ROOT

pytestmark = [pytest.mark.timeout(240), pytest.mark.extended]
PROGRAM = """
import json, os, sys, time
import numpy as np
import ringreduce as rr

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    team = trial.process_set
    for step in range(20):
        time.sleep(0.02 * (1 + trial.number % 3))
        x = rr.allreduce(x, name="x", process_set=team)
    if trial.number in (3, 14):
        raise ValueError("on purpose")
    if team.rank() == 0:
        with open(sys.argv[2], "a") as file:
            file.write(json.dumps([trial.params["x"], os.getpid()]) + chr(10))
    return x

rr.init()
found = rr.sweep(objective, 16, 2, storage=sys.argv[1])
if rr.rank() == 0:
    print(json.dumps([each._asdict() for each in found.trials]))
"""


def descendants(pid):
    """Of a process, by /proc."""
    children = collections.defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
        except OSError:
            continue
    found = [pid]
    for each in found:
        found += children[each]
    return found


@pytest.mark.parametrize("ending", ["db", "journal"])
def test_after_sigkill_of_everything_all_trials_are_done_and_none_twice(tmp_path, ending):
    program, log, storage = tmp_path / "program.py", tmp_path / "done", tmp_path / f"study.{ending}"
    program.write_text(PROGRAM)
    command = [jobs.ringrun(Path(sys.executable)), "-np", "4", sys.executable, program, storage, log]
    first = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=jobs.environment(), stdout=subprocess.DEVNULL)
    while not log.exists() or len(log.read_text().splitlines()) < 6:
        assert first.poll() is None, "it ended before it could be killed"
        time.sleep(0.05)
    for pid in descendants(first.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    first.wait(30)
    finished = jobs.run(command, cwd=ROOT, env=jobs.environment(), timeout_s=120)
    assert finished.returncode == 0, finished.stderr
    trials = json.loads(finished.stdout.splitlines()[-1].removeprefix("[0] "))
    assert len(trials) == 16
    assert collections.Counter(each["state"] for each in trials) == {"complete": 14, "failed": 2}
    assert all("ValueError: on purpose" in each["error"] for each in trials if each["state"] == "failed")
    recorded = collections.Counter(json.loads(line)[0] for line in log.read_text().splitlines())
    complete = [each["params"]["x"] for each in trials if each["state"] == "complete"]
    # a trial that was killed between its last line and the study's commit writes twice
    assert set(recorded) == set(complete)
    assert sum(recorded.values()) <= len(complete) + 2
    assert len(set(complete)) == 14
    assert "sweep: 16 of 16 trials, 2 failed, best" in finished.stderr
