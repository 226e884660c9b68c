"""What tests of ranks in threads share."""

import pytest

import ringreduce as rr
from ringreduce import reform
from ringreduce.optim import reducer
from tests.support import fake_cupy
from tests.support.tiers import parted


@pytest.fixture(autouse=True)
def no_cautious_steps(request, monkeypatch):
    """Tests of the torch optimizer have few steps: let gradients be reduced in backward from the first one on.

    Modules with CAUTIOUS = True begin as users' scripts do.
    """
    if not getattr(request.module, "CAUTIOUS", False):
        monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", 0)


@pytest.fixture(params=parted(["lazy", "eager", "random"], lambda mode: mode == "lazy"))
def gpu(request):
    """The fake CuPy with one GPU, which finds races, in each of its modes."""
    with fake_cupy.checked(request.param, seed=17) as cupy:
        yield cupy


@pytest.fixture
def elastic(monkeypatch):
    """Lets jobs be elastic. Its list has, for each reform, how many commits this rank had; by rank 0."""
    seen, worlds = [], {}

    def again(commits):
        everyones = rr.allgather_object(commits)
        if rr.rank() == 0:
            seen.append(everyones)
        worlds[rr.rank()] = reform.Reformed(1, everyones.index(max(everyones)), len(set(everyones)) == 1, ())
        return worlds[rr.rank()]

    monkeypatch.setattr(reform, "is_elastic", lambda: True)
    monkeypatch.setattr(reform, "reform", again)
    monkeypatch.setattr(reform, "latest", lambda: worlds.get(rr.rank()))
    return seen
