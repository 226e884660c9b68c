"""What all tests share."""

import sys

import hypothesis
import pytest

from tests import fake_cupy

# a first call may compile kernels, and the machine may be busy: how long a call takes is no matter for tests
hypothesis.settings.register_profile("ringreduce", deadline=None)
hypothesis.settings.load_profile("ringreduce")


def pytest_ignore_collect(collection_path, config):
    """tests/mpi is for ranks under a launcher; tests/end_to_end starts it there, with 1, 2, 3 and 4 of them."""
    return True if collection_path.name == "mpi" and not config.getoption("--with-mpi") else None


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
