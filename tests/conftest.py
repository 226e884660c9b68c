"""What all tests share."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from tests import fake_cupy

ROOT = Path(__file__).parents[1]
INSTALL_TIMEOUT_S = 600

# a first call may compile kernels, and the machine may be busy: how long a call takes is no matter for tests
hypothesis.settings.register_profile("ringreduce", deadline=None)
hypothesis.settings.load_profile("ringreduce")


def pytest_ignore_collect(collection_path, config):
    """tests/mpi is for ranks under a launcher; tests/end_to_end starts it there, with 1, 2, 3 and 4 of them."""
    return True if collection_path.name == "mpi" and not config.getoption("--with-mpi") else None


@pytest.fixture(scope="session")
def mpich_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with MPICH: $TEST_MPICH_PYTHON, or one that is made here as a user of that extra would make it."""
    if path := os.environ.get("TEST_MPICH_PYTHON"):
        return Path(path)
    folder = tmp_path_factory.mktemp("mpich")
    install = [folder / "bin" / "pip", "install", "-q", "-c", "constraints.txt", "-e", ".[mpich,test-mpi,examples]"]
    for command in ([sys.executable, "-m", "venv", folder], install):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin" / "python"


@pytest.fixture
def cupy(monkeypatch):
    """A fake CuPy, whose device memory cannot be touched from the host by mistake."""
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    return fake_cupy


@pytest.fixture
def threads_that_take_turns_quickly():
    """A rank that waits yields the core, which threads have only while they hold the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)
