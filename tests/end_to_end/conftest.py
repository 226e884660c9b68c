"""Jobs whose ranks print to one stream, and a test file that fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import environments, jobs

PROGRAMS = Path(__file__).parent / "programs"
FRONT_ENDS = ["accelerate", "transformers", "lightning"]
FRAMEWORKS = ["jax", "optax", "equinox", "flax", "orbax-checkpoint", "keras", "tensorflow-cpu"]
KERAS_2 = ["tf_keras"]  # which requires `tensorflow`, not tensorflow-cpu


def run(command, *, timeout_s=120, cwd=jobs.ROOT, returncode=None, **variables):
    """Run a command with these variables; returns the finished process, stderr within stdout."""
    options = {"timeout_s": timeout_s, "cwd": cwd, "returncode": returncode, "stderr": subprocess.STDOUT}
    return jobs.run(command, env=jobs.environment(**variables), **options)


def ringrun(python, ranks, *command, **options):
    """`ringrun -np RANKS python COMMAND …` with the ringrun that stands beside `python`."""
    return run([jobs.ringrun(python), *jobs.start_timeout(), "-np", ranks, python, *command], **options)


@pytest.fixture(scope="session")
def front_ends():
    """PYTHONPATH with PyTorch's front ends, for the Python that runs the tests."""
    path = environments.packages("TEST_FRONT_ENDS_PYTHON", ".venv-test-front-ends", *FRONT_ENDS)
    return {"PYTHONPATH": f"{path}:{jobs.ROOT}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def on_engine(engines, script):
    """Runs a program that has Dask, Ray or Spark; returns what it has printed."""

    def start(program, *arguments, **variables):
        python = {"timeout_s": 600, "returncode": 0, "PYSPARK_PYTHON": sys.executable, **engines, **variables}
        return run([sys.executable, script(program), *arguments], **python).stdout

    return start


@pytest.fixture(scope="session")
def frameworks():
    """PYTHONPATH with the frameworks, for the Python that runs the tests, whose MPI they use."""
    path = environments.packages("TEST_FRAMEWORKS_PYTHON", ".venv-test-frameworks", *FRAMEWORKS, alone=KERAS_2)
    return {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}


@pytest.fixture
def packages(request):
    """packages(page): variables by which its programs find what the tests' own environment lacks."""
    of = {"front-ends.md": "front_ends", "jax.md": "frameworks", "keras.md": "frameworks"}
    return lambda page: request.getfixturevalue(of[page]) if page in of else {}


@pytest.fixture
def broken(tmp_path):
    """A test file that fails, under the conftest of tests/mpi, which is what is tested."""
    (tmp_path / "conftest.py").write_text("from tests.mpi.conftest import pytest_configure, pytest_runtest_logreport\n")
    path = tmp_path / "test_broken_on_purpose.py"
    path.write_text((PROGRAMS / "broken.py").read_text())
    return path
