"""`ringrun --elastic --restarts`: where too few ranks are left, the job's next attempt goes on from the last commit."""

import pytest

from tests.elastic.test_deaths import STEPS, check, job
from tests.support import jobs

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("victims", [["1"], ["0", "1"]], ids=["a rank", "all ranks"])
def test_a_restart_goes_on_from_the_last_commit(python, tmp_path, victims):
    deaths = [f"{rank} step 20 SIGKILL" for rank in victims]
    stderr, found = job(python, tmp_path, 2, deaths, "--min-np", 2, "--restarts", 1)
    check(found, {0, 1}, tmp_path)
    assert [len(each["history"]) for each in found.values()] == [STEPS] * 2
    assert {each["began"] for each in found.values()} == {20}
    assert "ringrun: restart 1 of 1 in 1 s" in stderr


GROWS = """
import os, sys, time
import numpy as np
import ringreduce as rr

rr.init()
state = rr.elastic.ObjectState(step=0, sizes=[], attempts=[])

@rr.elastic.run
def train(state):
    while state.sizes.count(3) < 10:
        rr.allreduce(np.ones(3), name="gradient")
        state.sizes.append(rr.size())
        state.attempts.append(int(os.environ["RINGREDUCE_RESTART_COUNT"]))
        state.step += 1
        state.commit()
        if state.step == 10 and rr.rank() == 0:
            with open(sys.argv[1], "w") as file:
                file.write("localhost slots=4")
        time.sleep(0.02)

train(state)
assert state.attempts == sorted(state.attempts) and set(state.attempts) == {0, 1}
assert [size == 3 for size in state.sizes] == [attempt == 1 for attempt in state.attempts]
print("of", rr.size(), "all steps", len(state.sizes) == state.step >= 20)
"""


@pytest.mark.quick
def test_hosts_that_come_are_taken_after_the_next_commit(python, tmp_path):
    hosts, script = tmp_path / "hosts", tmp_path / "train.py"
    hosts.write_text("localhost slots=2")
    script.write_text(GROWS)
    flags = ["--elastic", "--restarts", 1, "-np", 2, "--max-np", 3, "--hostfile", hosts]
    done = jobs.run([jobs.ringrun(python), *flags, python, script, hosts], timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] of 3 all steps True" for rank in range(3)]
    came = "ringrun: localhost:4 came; after its next commit the job is started again, with 3 ranks instead of 2\n"
    assert came in done.stderr
    assert "failed" not in done.stderr
