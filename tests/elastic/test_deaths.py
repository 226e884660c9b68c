"""Ranks die in jobs of `ringrun --elastic`, and the others go on in the same processes, with the right result."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support import jobs
from tests.support.elastic.program import replay
from tests.support.patience import no_commits_left
from tests.support.tiers import parted

pytestmark = pytest.mark.timeout(300)

STEPS = 30
DEATHS = {
    "SIGKILL, the others in mid-step": (4, ["2 between 10 SIGKILL"]),
    "rank 0": (3, ["0 step 10 _exit7"]),
    "SIGSEGV": (3, ["1 step 10 SIGSEGV"]),
    "abort": (3, ["1 submitted 10 abort"]),
    "an exception": (3, ["1 step 10 raise"]),
    "sys.exit": (3, ["1 step 10 exit3"]),
    "in negotiation": (3, ["1 submitted 10 SIGKILL"]),
    "rank 0 in negotiation": (3, ["0 submitted 0 SIGKILL"]),
    "before the first step": (3, ["1 sync 0 SIGKILL"]),
    "soon after init": (4, ["1 start 0.001 SIGKILL"]),
    "two at once": (4, ["1 step 10 SIGKILL", "2 step 10 _exit5"]),
    "one after the other": (4, ["1 step 10 SIGKILL", "3 step 12 SIGKILL"]),
    "while the others re-form": (4, ["1 step 10 SIGKILL", "3 meeting 0 SIGKILL"]),
    "rank 0 while the others re-form": (4, ["1 step 10 SIGKILL", "0 meeting 0 _exit4"]),
    "all but one": (4, ["0 step 10 SIGKILL", "1 meeting 0 SIGKILL", "2 step 15 raise"]),
    "while leaving": (3, ["1 leaving 0 SIGKILL"]),
}
STALLS = {
    "SIGSTOP": (3, ["1 step 10 SIGSTOP"]),
    "SIGSTOP of rank 0": (3, ["0 step 10 SIGSTOP"]),
    "endless sleep": (3, ["1 step 10 sleep"]),
    "endless sleep of rank 0": (3, ["0 step 10 sleep"]),
    "SIGSTOP while the others re-form": (4, ["1 step 10 SIGKILL", "2 meeting 0 SIGSTOP"]),
    "SIGSTOP in an operation": (3, ["2 submitted 10 SIGSTOP"]),
}


def died(deaths):
    return {int(each.split()[0]) for each in deaths}


def job(python, folder, size, deaths, *flags, steps=STEPS, **variables):
    """Run one; returns what it printed, and what each surviving rank left."""
    command = [jobs.ringrun(python), "--elastic", *flags, "-np", size, python, "-m", "tests.support.elastic.program"]
    with no_commits_left():
        done = jobs.run([*command, steps, folder, *deaths], timeout_s=90, env=jobs.environment(**variables))
    found = {int(each.stem): json.loads(each.read_text()) for each in folder.glob("*.json")}
    assert done.returncode == 0, done.stderr
    return done.stderr, found


def check(found, survivors, folder, steps=STEPS):
    """All survivors have the parameters that one process computes, and are the processes of the start."""
    assert set(found) >= survivors
    for rank, result in found.items():
        assert len(result["history"]) == steps
        expected = replay(result["history"], len(result["parameters"]))
        np.testing.assert_allclose(result["parameters"], expected, rtol=1e-9, atol=1e-9)
        assert result["parameters"] == found[min(found)]["parameters"], "the same bits on all"
        assert result["pid"] == int(Path(folder, f"{rank}.pid").read_text().split()[-1])
        assert result["engines"] == 1, "a world that was given up keeps none"


@pytest.mark.adapters
@pytest.mark.parametrize("kind", parted(DEATHS, lambda kind: kind == "rank 0"))
def test_the_others_go_on(python, tmp_path, kind):
    size, deaths = DEATHS[kind]
    stderr, found = job(python, tmp_path, size, deaths)
    survivors = set(range(size)) - died(deaths)
    check(found, survivors, tmp_path)
    for rank in died(deaths):
        assert f"-- ringrun: rank {rank} of {size} failed --" in stderr
    if kind != "while leaving":
        assert found[min(survivors)]["size"] == len(survivors)
        assert set(found[min(survivors)]["history"][-1]) == survivors


@pytest.mark.parametrize("kind", ["rank 0", "two at once"])
def test_with_local_steps_the_others_begin_from_the_anchors(python, tmp_path, kind):
    """What is lost is what the ranks had learned since the last average."""
    size, deaths = DEATHS[kind]
    # in the third six: who is slow may lose the second, too, which the dead had finished; then these begin again
    deaths = [each.replace(" 10 ", " 16 ") for each in deaths]
    _, found = job(python, tmp_path, size, deaths, TRAINING_WAY="local")
    check(found, set(range(size)) - died(deaths), tmp_path)
    begun = [step for step, (_, begins) in enumerate(found[min(found)]["history"]) if begins]
    assert begun[0] == 0
    assert len(begun) == 12, "the first six steps, and those after the loss"


@pytest.mark.parametrize("kind", STALLS)
def test_ranks_that_hang_are_given_up(python, tmp_path, kind):
    size, deaths = STALLS[kind]
    limits = {"RINGREDUCE_STALL_ABORT_S": "8", "RINGREDUCE_STALL_CHECK_S": "2"}
    stderr, found = job(python, tmp_path, size, deaths, **limits)
    check(found, set(range(size)) - died(deaths), tmp_path)
    assert re.search(rf"rank {min(died(deaths))} of {size} failed -[^$]*ringrun killed it", stderr)


def test_spares_take_the_places(python, tmp_path):
    _, found = job(python, tmp_path, 4, ["0 step 5 SIGKILL", "3 step 20 _exit3"], "--spares", 2)
    check(found, {1, 2, 4, 5}, tmp_path)
    assert [len(each) for each in found[1]["history"]] == [4] * STEPS


def test_checks_begin_anew_in_each_world(python, tmp_path):
    """Else a spare, whose steps count from 0, would compare parts of other steps than the rest do."""
    flags = ["--spares", 1, "--check", "sdc:3"]
    stderr, found = job(python, tmp_path, 3, ["1 step 10 SIGKILL"], *flags, RINGREDUCE_DETERMINISTIC="1")
    check(found, {0, 2, 3}, tmp_path)
    assert "check=" not in stderr


def test_below_the_fewest_ranks_the_job_fails_as_ever(python, tmp_path):
    command = [jobs.ringrun(python), "--elastic", "--min-np", 2, "-np", 2, python]
    done = jobs.run(
        [*command, "-m", "tests.support.elastic.program", STEPS, tmp_path, "1 step 10 _exit7"], returncode=7
    )
    assert "the job cannot continue: 1 rank left, and --min-np is 2" in done.stderr


def test_a_rank_whose_operation_waits_for_one_that_hangs_goes_on(python, tmp_path):
    """The others have ended that operation, the first of all, and wait for both to submit the next one.

    It is an allgather: an all-reduce's messages depend on the wire as measured, and on what is fused.
    """
    limits = {"RINGREDUCE_STALL_ABORT_S": "8", "RINGREDUCE_STALL_CHECK_S": "2"}
    where = {"TRAINING_COUNT": "10", "TRAINING_PER_HOST": "2"}
    stderr, found = job(python, tmp_path, 4, ["1 message 1 SIGSTOP"], **limits, **where)
    check(found, {0, 2, 3}, tmp_path)
    assert "missing: ranks 1,3" in stderr
    assert "rank 3 of 4 failed" not in stderr


@pytest.mark.adapters
def test_without_ringrun_it_is_said_that_nobody_sees_deaths():
    program = [sys.executable, "-c", "import ringreduce; ringreduce.init()"]
    done = jobs.run(program, env=jobs.environment(RINGREDUCE_ELASTIC="1"), returncode=1)
    assert "only its agents see how a rank ends, which mpirun and srun do not report; start with" in done.stderr
