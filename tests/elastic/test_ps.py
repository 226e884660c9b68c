"""A parameter server in an elastic job goes on without a worker that is lost; a server's loss ends the job."""

import json

import pytest

from tests.support import jobs

STEPS, WORKERS = 40, 3


def job(python, folder, mode, victim, at):
    """Run one; returns the finished process, and what each rank left, by rank."""
    command = [jobs.ringrun(python), "--elastic", "--min-np", 2, "-np", WORKERS + 2, python]
    command += ["-m", "tests.support.elastic.ps_program", mode, victim, at, folder]
    done = jobs.run(command, timeout_s=90, env=jobs.environment())
    return done, {int(each.stem): json.loads(each.read_text()) for each in folder.glob("*.json")}


@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
def test_the_others_go_on_without_a_worker(python, tmp_path, mode):
    done, found = job(python, tmp_path, mode, 1, 10)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 5 failed" in done.stderr
    assert set(found) == {0, 2, 3, 4}
    assert [found[rank]["index"] for rank in (0, 2)] == [[0, 0], [2, 1]]
    assert {found[rank]["count"] for rank in (0, 2)} == {2}
    servers = [found[3], found[4]]
    totals = {value for each in servers for name, rows in each.items() if name != "pushes" for value in flat(rows)}
    if mode == "sync":  # the mean of 1, 2 and 3 for nine or ten steps, then of 1 and 3: it is 2 either way
        assert totals == {2.0 * STEPS}
        assert {each["pushes"] for each in servers} == {STEPS}
    else:  # all that the others pushed, once, and the lost one's first nine or ten
        assert totals <= {4.0 * STEPS + 2 * 9, 4.0 * STEPS + 2 * 10}
        assert {each["pushes"] for each in servers} <= {2 * STEPS + 9, 2 * STEPS + 10}


def test_a_worker_that_has_closed_outlives_another(python, tmp_path):
    """Worker 0 is three times as quick as the one that is lost in its last step."""
    done, found = job(python, tmp_path, "async", 2, STEPS)
    assert done.returncode == 0, done.stderr
    assert set(found) == {0, 1, 3, 4}


def flat(rows):
    return [value for row in rows for value in (row if isinstance(row, list) else [row])]


def test_a_server_that_is_lost_ends_the_job_and_is_named(python, tmp_path):
    done, found = job(python, tmp_path, "async", 4, 10)
    assert done.returncode != 0
    assert found == {}
    assert "rank 4 of 5 failed" in done.stderr
    assert "ps: server 4 is lost, and with it its part of the parameters" in done.stderr
