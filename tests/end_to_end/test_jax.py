"""ringreduce.jax in an environment with JAX: tests/jax on 1, 2, 3 and 4 ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import environments
from tests.end_to_end.conftest import ringrun
from tests.end_to_end.test_mpi_suite import PYTEST

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def with_jax():
    """PYTHONPATH with JAX, optax and equinox, for the Python that runs the tests, whose MPI they use."""
    python = environments.interpreter("TEST_JAX_PYTHON", ".venv-test-jax", "jax", "optax", "equinox")
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return {"PYTHONPATH": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_suite_passes_on_so_many_ranks(with_jax, ranks):
    finished = ringrun(Path(sys.executable), ranks, *PYTEST, "tests/jax", timeout_s=600, **with_jax)
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout
    assert re.search(r"^\[0\] \d{2,} passed", finished.stdout, re.MULTILINE), finished.stdout
