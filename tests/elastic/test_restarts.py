"""`ringrun --elastic --restarts`: where too few ranks are left, the job's next attempt goes on from the last commit."""

from pathlib import Path

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


@pytest.mark.adapters
def test_hosts_that_come_are_taken_after_the_next_commit(python, tmp_path):
    hosts, script = tmp_path / "hosts", Path(__file__).parent / "programs" / "grows.py"
    hosts.write_text("localhost slots=2")
    flags = ["--elastic", "--restarts", 1, "-np", 2, "--max-np", 3, "--hostfile", hosts]
    done = jobs.run([jobs.ringrun(python), *flags, python, script, hosts], timeout_s=120, returncode=0)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] of 3 all steps True" for rank in range(3)]
    came = "ringrun: localhost:4 joined; after its next commit the job starts again, with 3 ranks instead of 2\n"
    assert came in done.stderr
    assert "failed" not in done.stderr
