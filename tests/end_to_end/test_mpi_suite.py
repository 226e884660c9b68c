"""tests/mpi on 1, 2, 3 and 4 ranks, on both MPIs; and that a failure or a hang there is told, not waited for."""

import itertools
import re

import pytest

from tests.end_to_end.conftest import ringrun, run
from tests.support.tiers import parted

pytestmark = pytest.mark.timeout(900)
PYTEST = ["-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", "--color=no", "-q", "-rs", "-c", "pyproject.toml"]


QUICK = [("openmpi", 3, "not extended"), ("mpich", 2, "not extended")]
EVERYWHERE = [*QUICK, *itertools.product(["openmpi", "mpich"], [1, 2, 3, 4], [""])]


@pytest.mark.adapters
@pytest.mark.parametrize(
    ("python", "ranks", "tier"), parted(EVERYWHERE, lambda *case: case in QUICK), indirect=["python"]
)
def test_the_suite_passes_on_so_many_ranks(python, ranks, tier):
    finished = ringrun(python, ranks, *PYTEST, "-m", tier, "tests/mpi", timeout_s=400, returncode=0)
    print(finished.stdout)
    assert re.search(r"^\[0\] \d{2,} passed", finished.stdout, re.MULTILINE), finished.stdout


def test_the_launchers_jobs_on_mpich(mpich_python):
    finished = run(
        [mpich_python, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", "-m", "jobs", "tests/launcher"],
        timeout_s=600,
        returncode=0,
    )
    print(finished.stdout)


@pytest.mark.adapters
def test_a_hang_ends_the_run_with_every_ranks_stack(python, broken):
    finished = ringrun(python, 3, *PYTEST, f"{broken}::test_all_ranks_hang", timeout_s=60, returncode=1)
    assert "time.sleep(1)" in finished.stdout, "the stack of rank 0"
    assert "in barrier" in finished.stdout, "the stack of a rank that waits for it"
