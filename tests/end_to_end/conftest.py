"""Jobs whose ranks print to one stream, and a test file that fails."""

import subprocess
from pathlib import Path

import pytest

from tests.support import jobs

PROGRAMS = Path(__file__).parent / "programs"


def run(command, *, timeout_s=120, cwd=jobs.ROOT, returncode=None, **variables):
    """Run a command with these variables; returns the finished process, stderr within stdout."""
    options = {"timeout_s": timeout_s, "cwd": cwd, "returncode": returncode, "stderr": subprocess.STDOUT}
    return jobs.run(command, env=jobs.environment(**variables), **options)


def ringrun(python, ranks, *command, **options):
    """`ringrun -np RANKS python COMMAND …` with the ringrun that stands beside `python`."""
    return run([jobs.ringrun(python), "-np", ranks, python, *command], **options)


@pytest.fixture
def broken(tmp_path):
    """A test file that fails, under the conftest of tests/mpi, which is what is tested."""
    (tmp_path / "conftest.py").write_text("from tests.mpi.conftest import pytest_configure, pytest_runtest_logreport\n")
    path = tmp_path / "test_broken_on_purpose.py"
    path.write_text((PROGRAMS / "broken.py").read_text())
    return path
