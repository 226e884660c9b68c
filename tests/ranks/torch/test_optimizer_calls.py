"""How many Python functions a step of the torch optimizer calls: a count, which no load on the machine changes."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.execution.host import HostResources
from ringreduce.optim.reducer import CAUTIOUS_STEPS
from ringreduce.testing import run_ranks

PACKAGE = str(Path(rr.__file__).parent)
WARM, COUNTED = 2 * CAUTIOUS_STEPS, 20
STEP, GRADIENT, WAIT = 150, 10, 2  # at most; a step may have waited, or not, in all that were counted


def fewest_calls(layers):
    """Of any of some steps in the caller's thread: ours, and those of Python's library that ours call."""
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(layers)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    inputs, calls = torch.ones(2, 3) * (rr.rank() + 1), [0]

    def note(frame, event, _):
        path, caller = frame.f_code.co_filename, frame.f_back.f_code.co_filename
        is_ours = path.startswith(PACKAGE) or (caller.startswith(PACKAGE) and path == contextlib.__file__)
        calls[0] += event == "call" and is_ours

    def step():
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    for _ in range(WARM):
        step()
    found = []
    for _ in range(COUNTED):
        calls[0] = 0
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
        found.append(calls[0])
    return min(found)


@pytest.mark.parametrize("overlaps", [True, False], ids=["as they fill", "at the end"])
def test_a_step_and_one_more_gradient_call_few_functions(overlaps, monkeypatch):
    """By two ranks. A layer has two gradients, and all share a bucket."""
    monkeypatch.setattr(HostResources, "overlaps", overlaps)
    for rank, counts in enumerate(run_ranks(2, lambda: [fewest_calls(layers) for layers in (1, 2, 5)])):
        one, two, five = counts
        assert one <= STEP, f"rank {rank}: {counts}"
        assert (five - two - WAIT) / 6 <= GRADIENT, f"rank {rank}: {counts}"
