"""train_gpt.py on real ranks, tiny: it learns, any number of ranks trains the same model, and it resumes."""

import functools
import importlib.util
import math
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from tests.support.world import on_a_pool

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="train_gpt.py needs torch"),
]

STEPS = 6
TINY = ["--dtype=float64", "--batch=12", "--width=16", "--depth=2", "--heads=2", "--context=16"]
KILLED_WHILE_SAVING = Path(__file__).parent / "programs" / "killed_while_saving.py"


def losses_in(checkpoint):
    import torch

    return torch.load(checkpoint)["losses"]


@pytest.fixture(scope="module")
def straight(ringrun, examples, tmp_path_factory):
    """straight(size): a run of STEPS steps in one go; returns (ended process, losses). Run once each."""

    @functools.cache
    def run(size):
        path = tmp_path_factory.mktemp("gpt") / "gpt.pt"
        ended = ringrun(size, examples / "train_gpt.py", *TINY, "--checkpoint", path, "--steps", STEPS)
        return ended, losses_in(path)

    return run


@pytest.mark.parametrize("size", [2, 4])
def test_loss_curve_is_that_of_one_rank(straight, size):
    _, alone = straight(1)
    _, together = straight(size)
    assert len(alone) == STEPS
    np.testing.assert_allclose(together, alone, rtol=1e-9)


def test_it_learns_and_rank_0_alone_shows_the_loss_and_a_sample(straight, lines):
    ended, losses = straight(2)
    assert losses[0] == pytest.approx(math.log(256), abs=0.05)  # all bytes equally likely
    assert losses[-1] < losses[0] - 0.02
    printed = lines(ended.stdout)
    assert printed[0] == f"step {STEPS} of {STEPS}, on cpu: loss {losses[-1]:.3f} nats per byte"
    assert printed[1].startswith("def ")


@on_a_pool
def test_run_resumed_on_more_ranks_continues_the_same_curve(world, examples, tmp_path):
    """Rank 0 trains alone, and then both, in a job that is there: Pythons that import torch take seconds each."""

    def program():
        sys.path.insert(0, str(examples))
        import torch
        import train_gpt

        def train(name, steps, *more):
            train_gpt.main([*TINY, "--checkpoint", str(tmp_path / name), "--steps", str(steps), *more])
            torch.set_grad_enabled(True)
            torch.set_default_dtype(torch.float32)

        rank = rr.rank()
        rr.shutdown()
        if rank == 0:
            rr.init([0])
            train("whole.pt", STEPS)
            train("part.pt", STEPS // 2)
            assert len(losses_in(tmp_path / "part.pt")) == STEPS // 2
            rr.shutdown()
        rr.init()
        train("part.pt", STEPS, "--resume")

    world(2).run(program, timeout_s=60)
    np.testing.assert_allclose(losses_in(tmp_path / "part.pt"), losses_in(tmp_path / "whole.pt"), rtol=1e-9)


def test_rank_killed_while_saving_leaves_the_old_checkpoint(ringrun, examples, straight, tmp_path):
    arguments = [*TINY, "--checkpoint", tmp_path / "gpt.pt", "--steps", STEPS, "--save-every", "1"]
    ringrun(2, KILLED_WHILE_SAVING, examples, *arguments, returncode=128 + signal.SIGKILL)
    assert len(losses_in(tmp_path / "gpt.pt")) == 1
    ringrun(2, examples / "train_gpt.py", *arguments, "--resume")
    np.testing.assert_allclose(losses_in(tmp_path / "gpt.pt"), straight(2)[1], rtol=1e-9)


def test_after_a_failure_ringrun_starts_it_again_and_it_goes_on(ringrun, examples, straight, tmp_path):
    arguments = [*TINY, "--checkpoint", tmp_path / "gpt.pt", "--steps", STEPS, "--save-every", "1"]
    ended = ringrun(2, KILLED_WHILE_SAVING, examples, *arguments, flags=["--restarts", "1"])
    assert "ringrun: restart 1 of 1 in 1 s\n" in ended.stderr
    assert f"step 1 of {STEPS}" in ended.stdout
    assert ended.stdout.count(f"step 2 of {STEPS}") == 1, "it went on after the first"
    np.testing.assert_allclose(losses_in(tmp_path / "gpt.pt"), straight(2)[1], rtol=1e-9)
