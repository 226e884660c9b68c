"""What all tests share."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from ringreduce import log
from ringreduce.transport import peers
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
    """A fake CuPy, whose device memory cannot be touched from the host by mistake, nor by two streams without order.

    What is queued on its streams runs as late as it can.
    """
    with fake_cupy.checked() as fake:
        _put_in_place(fake, monkeypatch)
        yield fake


@pytest.fixture(params=[("lazy", 0), ("eager", 0), ("random", 1), ("random", 2), ("random", 3)], ids=str)
def cupy_of_every_mode(request, monkeypatch):
    """The fake CuPy, whose streams run as late as they can, as soon as they can, and at random."""
    with fake_cupy.checked(*request.param) as fake:
        _put_in_place(fake, monkeypatch)
        yield fake


def _put_in_place(fake, monkeypatch):
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "process", lambda: fake.machine.process_number)


@pytest.fixture
def fresh_log():
    """The logger as it is when a program starts; what a test does to it is undone."""
    logger = log.LOGGER
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


@pytest.fixture
def log_as_after_init(fresh_log):
    log.configure("warning", False)


@pytest.fixture
def threads_that_take_turns_quickly():
    """A rank that waits yields the core, which threads have only while they hold the interpreter."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)
