"""Jobs whose ranks print to one stream, and a test file that fails."""

import subprocess
from pathlib import Path

import pytest

from tests.support import environments, jobs

PROGRAMS = Path(__file__).parent / "programs"
FRONT_ENDS = ["accelerate", "transformers", "lightning"]


def run(command, *, timeout_s=120, cwd=jobs.ROOT, returncode=None, **variables):
    """Run a command with these variables; returns the finished process, stderr within stdout."""
    options = {"timeout_s": timeout_s, "cwd": cwd, "returncode": returncode, "stderr": subprocess.STDOUT}
    return jobs.run(command, env=jobs.environment(**variables), **options)


def ringrun(python, ranks, *command, **options):
    """`ringrun -np RANKS python COMMAND …` with the ringrun that stands beside `python`."""
    return run([jobs.ringrun(python), "-np", ranks, python, *command], **options)


@pytest.fixture(scope="session")
def front_ends():
    """PYTHONPATH with PyTorch's front ends, for the Python that runs the tests."""
    path = environments.packages("TEST_FRONT_ENDS_PYTHON", ".venv-test-front-ends", *FRONT_ENDS)
    return {"PYTHONPATH": f"{path}:{jobs.ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def broken(tmp_path):
    """A test file that fails, under the conftest of tests/mpi, which is what is tested."""
    (tmp_path / "conftest.py").write_text("from tests.mpi.conftest import pytest_configure, pytest_runtest_logreport\n")
    path = tmp_path / "test_broken_on_purpose.py"
    path.write_text((PROGRAMS / "broken.py").read_text())
    return path
