"""Interpreters with one MPI each: the one that runs the tests (Open MPI), and one with MPICH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command, *, timeout_s=120, cwd=ROOT, **variables):
    """Run a command as a user would, outside of any MPI job; returns the finished process, stderr within stdout."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "RINGREDUCE"))
    }
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def ringrun(python, ranks, *command, **options):
    """`ringrun -np RANKS python COMMAND …` with the ringrun that stands beside `python`."""
    return run([python.parent / "ringrun", "-np", str(ranks), python, *command], **options)


@pytest.fixture(params=["Open MPI", "MPICH"])
def python(request):
    """An interpreter whose mpi4py loads this MPI."""
    return request.getfixturevalue("mpich_python") if request.param == "MPICH" else Path(sys.executable)
