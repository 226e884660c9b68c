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

from ringreduce.sweeps.study import REPEATS
from tests.end_to_end.conftest import PROGRAMS
from tests.support import jobs
from tests.support.jobs import ROOT
from tests.support.patience import patient

optuna = pytest.importorskip("optuna")
pytestmark = [pytest.mark.timeout(240), pytest.mark.extended]
FAILING, HELD = (3, 14), (6, 7)
"""The trials that raise: one in each job; and those that run when the first job is killed, one on each team."""


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


def kill_everything(process):
    for pid in descendants(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait(patient(30))


def recorded(log, event):
    """[(number, x, ranks of the team)], in order of number."""
    lines = log.read_text().splitlines() if log.exists() else []
    return sorted(tuple(rest) for kind, *rest in map(json.loads, lines) if kind == event)


def numbers(rows):
    return [number for number, *_ in rows]


def states(storage):
    """What the study has: {number: state} and {number: number of the trial that it repeats}."""
    if storage.suffix == ".db":
        opened = f"sqlite:///{storage}"
    else:
        opened = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(storage)))
    trials = optuna.load_study(study_name="sweep", storage=opened).trials
    repeats = {each.number: each.user_attrs[REPEATS] for each in trials if REPEATS in each.user_attrs}
    return {each.number: each.state.name for each in trials}, repeats


@pytest.mark.parametrize("ending", ["db", "journal"])
def test_after_sigkill_of_everything_all_trials_are_done_and_none_twice(tmp_path, ending):
    log, storage, go_on = (tmp_path / each for each in ("log", f"study.{ending}", "go_on"))
    program = [PROGRAMS / "sweeps.py", storage, log, go_on, json.dumps([FAILING, HELD])]
    command = [jobs.ringrun(Path(sys.executable)), "-np", "4", sys.executable, *program]
    first = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=jobs.environment(), stdout=subprocess.DEVNULL)
    try:
        while not set(HELD) <= set(numbers(recorded(log, "began"))):
            assert first.poll() is None, "it ended before it could be killed"
            time.sleep(0.05)
    finally:
        kill_everything(first)
    # each team had told how its trials ended before it began the one in which it was held
    assert numbers(recorded(log, "began")) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert numbers(recorded(log, "ended")) == [0, 1, 2, 4, 5]
    assert sorted(ranks for number, _, ranks in recorded(log, "began") if number in HELD) == [[0, 1], [2, 3]]
    before = dict.fromkeys([0, 1, 2, 4, 5], "COMPLETE") | {3: "FAIL"}
    assert states(storage) == (before | dict.fromkeys(HELD, "RUNNING"), {})

    go_on.touch()
    finished = jobs.run(command, cwd=ROOT, env=jobs.environment(), timeout_s=120, returncode=0)
    assert numbers(recorded(log, "began")) == list(range(18))  # each once; 8 and 9 are 6 and 7 again
    assert numbers(recorded(log, "ended")) == [each for each in range(18) if each not in FAILING + HELD]
    tried = {number: x for number, x, _ in recorded(log, "began")}
    assert [tried[8], tried[9]] == [tried[6], tried[7]]
    assert len(set(tried.values())) == 16
    after = dict.fromkeys(range(8, 18), "COMPLETE") | dict.fromkeys((*HELD, 14), "FAIL")
    assert states(storage) == (before | after, {8: 6, 9: 7})

    trials = json.loads(finished.stdout.splitlines()[-1].removeprefix("[0] "))
    assert [each["number"] for each in trials] == [0, 1, 2, 3, 4, 5, *range(8, 18)]
    for each in trials:
        failing = each["number"] in FAILING
        assert each["state"] == ("failed" if failing else "complete")
        assert each["params"] == {"x": tried[each["number"]]}
        assert each["value"] == (None if failing else tried[each["number"]])
        assert ("ValueError: on purpose" in each["error"]) == failing
    assert "sweep: 16 of 16 trials, 2 failed, best" in finished.stderr
