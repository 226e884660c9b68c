"""What tests of ranks in threads share."""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_cautious_steps(request, monkeypatch):
    """Tests of the torch optimizer have few steps: let gradients be reduced in backward from the first one on.

    Modules with CAUTIOUS = True begin as users' scripts do.
    """
    reducer = sys.modules.get("ringreduce.torch.reducer")
    if reducer is not None and not getattr(request.module, "CAUTIOUS", False):
        monkeypatch.setattr(reducer, "CAUTIOUS_STEPS", 0)
