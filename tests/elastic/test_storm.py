"""Jobs whose ranks die at random, elastic and not; storm.py runs one again by the seed in a test's name."""

import pytest

from tests.support import tiers
from tests.support.cluster.hosts import why_not
from tests.support.elastic import isolated, plain, storm

pytestmark = [pytest.mark.timeout(300), pytest.mark.extended]


@pytest.mark.parametrize(("spares", "way"), [(0, ""), (2, ""), (0, "sharded"), (0, "local"), (2, "local")])
@pytest.mark.parametrize("seed", tiers.seeds([], 5))
def test_each_job_goes_on(python, seed, spares, way):
    if reason := why_not({"unshare": "util-linux"}):
        pytest.skip(reason)
    job = storm.draw(seed, spares, way)
    outcome = storm.run(job, python)
    assert outcome.wrong == [], f"{job}: {outcome.died} died\n{outcome.printed}"


@pytest.mark.parametrize("seed", tiers.seeds([], 3))
def test_each_plain_job_ends_and_names_who_failed(python, seed):
    if reason := why_not({"unshare": "util-linux"}):
        pytest.skip(reason)
    outcome = plain.run(plain.draw(seed), python)
    assert outcome.wrong == [], f"{plain.draw(seed)}\n{outcome.printed}"


@pytest.mark.parametrize(("code", "named"), [(0, "1"), (137, "0"), (None, "1")])
def test_a_wrong_code_or_name_is_seen(code, named):
    job = plain.Job(2, 1, 0.5, "SIGKILL", False)
    ended = isolated.Ended(1.0, f"-- ringrun: rank {named} of 2 failed first --", code, [])
    wrong = plain.faults(job, ended.printed)
    assert len(storm.outcome(ended, 137, wrong, [1]).wrong) == 1
    assert storm.outcome(ended._replace(code=137), 137, [], [1]).wrong == []


def test_what_a_job_leaves_is_seen():
    if reason := why_not({"unshare": "util-linux"}):
        pytest.skip(reason)
    leaving = "setsid sh -c 'sleep 1000 & wait' & touch /dev/shm/memory $TMPDIR/file"
    left = isolated.run(["sh", "-ec", leaving]).left
    assert [line.split()[-1] for line in left] == ["wait", "1000", "memory", "file"], left
