"""Interpreters with one MPI each: the one that runs the tests (Open MPI), and one with MPICH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient
from tests.tiers import extended

ROOT = Path(__file__).parents[2]


def outside_of_any_job(**changes):
    """The environment, without what an MPI job that these tests run in has put there."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "RINGREDUCE"))} | changes


def run(command, *, timeout_s=120, cwd=ROOT, **variables):
    """Run a command as a user would, outside of any MPI job; returns the finished process, stderr within stdout."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=outside_of_any_job(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(timeout_s),
    )


def ringrun(python, ranks, *command, **options):
    """`ringrun -np RANKS python COMMAND …` with the ringrun that stands beside `python`."""
    return run([python.parent / "ringrun", "-np", str(ranks), python, *command], **options)


@pytest.fixture(params=["Open MPI", pytest.param("MPICH", marks=extended)])
def python(request):
    """An interpreter whose mpi4py loads this MPI."""
    return request.getfixturevalue("mpich_python") if request.param == "MPICH" else Path(sys.executable)


BROKEN = """
import time
import pytest
import ringreduce as rr

pytestmark = pytest.mark.mpi

def test_one_rank_fails():
    assert rr.rank() != 1, "the one that failed"
    rr.barrier()

@pytest.mark.timeout(3)
def test_all_ranks_hang():
    while True:
        rr.barrier() if rr.rank() else time.sleep(1)
"""


@pytest.fixture
def broken(tmp_path):
    """A test file that fails, under the conftest of tests/mpi, which is what is tested."""
    (tmp_path / "conftest.py").write_text("from tests.mpi.conftest import pytest_configure, pytest_runtest_logreport\n")
    path = tmp_path / "test_broken_on_purpose.py"
    path.write_text(BROKEN)
    return path
