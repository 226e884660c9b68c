"""`ringrun --elastic --restarts`: where too few ranks are left, the job's next attempt goes on from the last commit."""

import pytest

from tests.elastic.test_deaths import STEPS, check, job

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("victims", [["1"], ["0", "1"]], ids=["a rank", "all ranks"])
def test_a_restart_goes_on_from_the_last_commit(python, tmp_path, victims):
    deaths = [f"{rank} step 20 SIGKILL" for rank in victims]
    stderr, found = job(python, tmp_path, 2, deaths, "--min-np", 2, "--restarts", 1)
    check(found, {0, 1}, tmp_path)
    assert [len(each["history"]) for each in found.values()] == [STEPS] * 2
    assert {each["began"] for each in found.values()} == {20}
    assert "ringrun: restart 1 of 1 in 1 s" in stderr
