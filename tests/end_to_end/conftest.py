"""Interpreters with one MPI each: the one that runs the tests (Open MPI), and one made here for MPICH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALL_TIMEOUT_S = 600


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


@pytest.fixture(scope="session")
def mpich_python(tmp_path_factory):
    """A virtual environment with MPICH, as a user of that extra would make it."""
    folder = tmp_path_factory.mktemp("mpich")
    install = [folder / "bin" / "pip", "install", "-q", "-c", "constraints.txt", "-e", ".[mpich,test-mpi]"]
    for command in ([sys.executable, "-m", "venv", folder], install):
        finished = run(command, timeout_s=INSTALL_TIMEOUT_S)
        assert finished.returncode == 0, finished.stdout
    return folder / "bin" / "python"


@pytest.fixture(params=["Open MPI", "MPICH"])
def python(request):
    """An interpreter whose mpi4py loads this MPI."""
    return request.getfixturevalue("mpich_python") if request.param == "MPICH" else Path(sys.executable)
