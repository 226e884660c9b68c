"""Jobs of `ringrun --elastic` whose ranks die at random; storm.py runs one again by the seed in a test's name."""

import pytest

from tests.cluster.hosts import why_not
from tests.elastic import storm
from tests.support import tiers

pytestmark = [pytest.mark.timeout(300), pytest.mark.extended]


@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("seed", tiers.seeds([], 5))
def test_each_job_goes_on(python, seed, spares):
    if reason := why_not({"unshare": "util-linux"}):
        pytest.skip(reason)
    job = storm.draw(seed, spares)
    outcome = storm.run(job, python)
    assert outcome.wrong == [], f"{job}: {outcome.died} died\n{outcome.printed}"
