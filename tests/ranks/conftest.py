"""What tests of ranks in threads share."""

import pytest

import ringreduce as rr
from ringreduce.engine import express
from ringreduce.optim import reducer
from ringreduce.runtime import Runtime
from tests.support import fake_cupy
from tests.support.tiers import parted


@pytest.fixture(autouse=True)
def no_cautious_steps(request, monkeypatch):
    """Tests of the torch optimizer have few steps: let gradients be reduced in backward from the first one on.

    Modules with CAUTIOUS = True begin as users' scripts do.
    """
    if not getattr(request.module, "CAUTIOUS", False):
        monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", 0)


@pytest.fixture
def more_patience(monkeypatch):
    """For ranks that go the fast way, and wait for others, whose cores other programs may have."""
    monkeypatch.setattr(express, "PATIENCE_US", 20_000.0)


@pytest.fixture(params=parted(["lazy", "eager", "random"], lambda mode: mode == "lazy"))
def gpu(request):
    """The fake CuPy with one GPU, which finds races, in each of its modes."""
    with fake_cupy.checked(request.param, seed=17) as cupy:
        yield cupy


@pytest.fixture
def elastic(monkeypatch):
    """Lets jobs be elastic. Its list has, for each reform, how many commits this rank had; by rank 0."""
    seen = []

    def reform(self, commits):
        everyones = rr.allgather_object(commits)
        if rr.rank() == 0:
            seen.append(everyones)
        self.root = everyones.index(max(everyones))
        return len(set(everyones)) == 1

    monkeypatch.setattr(Runtime, "is_elastic", True)
    monkeypatch.setattr(Runtime, "is_whole", lambda self: False)  # errors that a test raises stand for losses
    monkeypatch.setattr(Runtime, "reform", reform)
    return seen
