"""train_gpt.py on real ranks, tiny: it learns, any number of ranks trains the same model, and it resumes."""

import functools
import importlib.util
import json
import math
import signal
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from tests.world import on_a_pool

MISSING = [name for name in ("torch", "matplotlib", "tqdm") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(MISSING), reason=f"train_gpt.py needs {', '.join(MISSING)}"),
]

SIZES = [1, 2, 4]
STEPS = 6
TINY = ["--dtype=float64", "--batch=12", "--width=16", "--depth=2", "--heads=2", "--context=16", "--warmup=2"]
KILLED_WHILE_SAVING = Path(__file__).parent / "programs" / "killed_while_saving.py"


def record_in(out):
    return json.loads((out / "losses.json").read_text())


@pytest.fixture(scope="module")
def train(ringrun, examples):
    """train(size, out, steps, *more): run until that step; returns what was printed, and what was recorded."""

    def run(size, out, steps, *more):
        ended = ringrun(size, examples / "train_gpt.py", *TINY, "--out", out, "--steps", steps, *more)
        return ended, record_in(out)

    return run


@pytest.fixture(scope="module")
def straight(train, tmp_path_factory):
    """straight(size): a run of STEPS steps in one go; returns (output folder, ended process, record). Run once each."""

    @functools.cache
    def run(size):
        out = tmp_path_factory.mktemp("gpt") / "out"
        return out, *train(size, out, STEPS)

    return run


@pytest.mark.parametrize("size", SIZES[1:])
def test_loss_curve_is_that_of_one_rank(straight, size):
    *_, alone = straight(1)
    *_, together = straight(size)
    assert len(alone["losses"]) == STEPS
    np.testing.assert_allclose(together["losses"], alone["losses"], rtol=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_bit_identical_on_all_ranks(straight, size):
    *_, record = straight(size)
    assert len(record["digests"]) == size
    assert len(set(record["digests"])) == 1


def test_it_learns(straight):
    *_, record = straight(2)
    assert record["losses"][0] == pytest.approx(math.log(256), abs=0.05)  # all bytes equally likely
    assert record["losses"][-1] < record["losses"][0] - 0.1


def test_rank_0_alone_shows_progress_loss_speed_and_a_sample(straight, lines):
    _, ended, record = straight(2)
    printed = lines(ended.stdout)
    assert f"loss {record['losses'][0]:.3f} at step 1, {record['losses'][-1]:.3f} at step {STEPS};" in printed[1]
    assert printed[1].endswith(" tokens/s")
    assert printed[3] == "a sample of what it writes:"
    assert printed[5].startswith("def ")
    progress = lines(ended.stderr)[-1]
    assert progress.startswith("100%")
    assert "tokens/s" in progress
    assert f"loss={record['losses'][-1]:.3f}" in progress


def test_plot_is_a_png_of_readable_size(straight):
    out, *_ = straight(2)
    content = (out / "loss.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert 600 <= width <= 2000
    assert 300 <= height <= 1500
    assert 5_000 < len(content) < 500_000  # an empty picture of this size takes 2 kB


@on_a_pool
def test_run_resumed_on_more_ranks_continues_the_same_curve(world, examples, tmp_path):
    """Rank 0 trains alone, and then both, in a job that is there: Pythons that import torch take seconds each."""

    def program():
        sys.path.insert(0, str(examples))
        import train_gpt

        def train(out, steps, *more):
            train_gpt.main([*TINY, "--out", str(tmp_path / out), "--steps", str(steps), *more])
            torch.set_default_dtype(torch.float32)

        import torch

        rank = rr.rank()
        rr.shutdown()
        if rank == 0:
            rr.init([0])
            train("whole", STEPS)
            train("part", STEPS // 2)
            first = record_in(tmp_path / "part")
            rr.shutdown()
            assert len(first["losses"]) == STEPS // 2
        rr.init()
        train("part", STEPS, "--resume")

    world(2).run(program, timeout_s=60)
    whole, resumed = (record_in(tmp_path / out) for out in ("whole", "part"))
    np.testing.assert_allclose(resumed["losses"], whole["losses"], rtol=1e-9)
    assert len(resumed["digests"]) == 2
    assert len(set(resumed["digests"])) == 1


def test_rank_killed_while_saving_leaves_the_old_checkpoint(ringrun, examples, train, straight, tmp_path):
    arguments = [*TINY, "--out", tmp_path, "--steps", STEPS, "--save-every", "1"]
    ringrun(2, KILLED_WHILE_SAVING, examples, *arguments, returncode=128 + signal.SIGKILL)
    assert not (tmp_path / "losses.json").exists()  # it did not come to the end
    *_, whole = straight(2)
    _, resumed = train(2, tmp_path, STEPS, "--resume")
    np.testing.assert_allclose(resumed["losses"], whole["losses"], rtol=1e-9)


def test_after_a_failure_ringrun_starts_it_again_and_it_goes_on(ringrun, examples, straight, tmp_path):
    arguments = [*TINY, "--out", tmp_path, "--steps", STEPS, "--save-every", "1"]
    ended = ringrun(2, KILLED_WHILE_SAVING, examples, *arguments, flags=["--restarts", "1"])
    assert "ringrun: restart 1 of 1 in 1 s\n" in ended.stderr
    *_, whole = straight(2)
    resumed = record_in(tmp_path)
    np.testing.assert_allclose(resumed["losses"], whole["losses"], rtol=1e-9)


def test_resume_without_a_checkpoint_is_refused_on_every_rank(ringrun, examples, tmp_path):
    ended = ringrun(2, examples / "train_gpt.py", *TINY, "--out", tmp_path, "--resume", returncode=1)
    expected = f"--resume: there is no {tmp_path / 'checkpoint.pt'}; train without --resume first, or pass its --out"
    assert f"[0] {expected}" in ended.stderr or f"[1] {expected}" in ended.stderr


def test_batch_that_ranks_cannot_share_equally_is_refused(ringrun, examples, tmp_path):
    ended = ringrun(2, examples / "train_gpt.py", "--batch", "7", "--out", tmp_path, returncode=1)
    assert "--batch 7 cannot be shared equally by 2 ranks; pass a multiple of 2, such as --batch 8" in ended.stderr
