"""train_imagenet.py, tiny: one loss curve with and without a break, and all images seen when a rank dies."""

import collections
import functools
import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from tests.support import jobs
from tests.support.world import on_a_pool

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="train_imagenet.py needs torch"),
]

TINY = ["--model=resnet18", "--pixels=32", "--batch=4", "--warmup=1", "--epochs=2", "--every=1"]
PROGRAM = Path(__file__).parent / "programs" / "killed_in_training.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """48 images of three classes to train on, each class of its own colour, and 8 to validate with."""
    from PIL import Image

    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, count in (("train", 48), ("val", 8)):
        for number in range(count):
            label = number % 3
            pixels = rng.integers(0, 128, (48, 40, 3), dtype=np.uint8)
            pixels[..., label] += 100
            path = root / split / "abc"[label] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return root


@pytest.fixture(scope="module")
def straight(ringrun, examples, data, tmp_path_factory):
    """straight(size): a run without a break; returns (its lines but for the speed, its checkpoint). Run once each."""

    @functools.cache
    def run(size):
        path = tmp_path_factory.mktemp("straight") / "imagenet.pt"
        arguments = [*TINY, "--data", data, "--checkpoint", path]
        return curve(ringrun(size, examples / "train_imagenet.py", *arguments).stdout), loaded(path)

    return run


def curve(text):
    """What was printed, without how fast it was, and without that it was stopped."""
    lines = [line.removeprefix("[0] ") for line in text.splitlines() if "SIGUSR1" not in line]
    return [re.sub(r", [\d,]+ images/s", "", line) for line in lines]


def loaded(path):
    import torch

    return torch.load(path, weights_only=True)


def test_it_learns_and_says_how_fast(ringrun, examples, straight, tmp_path):
    lines, saved = straight(2)
    assert [line[:12] for line in lines] == [
        *[f"epoch {step / 6:.3f}:" for step in range(1, 7)],
        "epoch 1 of 2",
        *[f"epoch {1 + step / 6:.3f}:" for step in range(1, 7)],
        "epoch 2 of 2",
    ]
    assert saved["epoch"] == 2
    arguments = ["--model=resnet18", "--pixels=32", "--batch=16", "--epochs=1", "--warmup=1"]
    done = ringrun(2, examples / "train_imagenet.py", *arguments, "--checkpoint", tmp_path / "imagenet.pt")
    assert re.search(r"epoch 0\.933: loss 0\.\d+, [\d,]+ images/s on 2 ranks\n", done.stdout), done.stdout
    assert float(re.search(r"accuracy ([\d.]+)%", done.stdout)[1]) > 80, "it has not learnt the two photographs"


def test_stopped_by_a_signal_and_resumed_it_has_the_curve_of_a_run_without_a_break(
    ringrun, examples, data, straight, tmp_path
):
    import torch

    path = tmp_path / "imagenet.pt"
    arguments = [examples / "train_imagenet.py", *TINY, "--data", data, "--checkpoint", path]
    ringrun_command = [jobs.ringrun(Path(sys.executable)), "-np", 2, "--forward-signals", "USR1", sys.executable]
    command = [str(each) for each in (*ringrun_command, *arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=jobs.environment()) as job:
        first = job.stdout.readline()
        job.send_signal(signal.SIGUSR1)
        broken = first + job.stdout.read()
    assert job.returncode == 0
    assert broken.endswith(f"[0] SIGUSR1: stopped; --resume goes on from {path}\n")
    resumed = ringrun(2, *arguments, "--resume").stdout
    lines, saved = straight(2)
    assert curve(broken) + curve(resumed) == lines
    for name, value in loaded(path)["model"].items():
        torch.testing.assert_close(value, saved["model"][name], rtol=1e-6, atol=1e-7, msg=name)


def test_when_a_rank_is_killed_the_others_train_on_all_images_that_are_left(
    ringrun, examples, data, straight, tmp_path
):
    arguments = [PROGRAM, examples, tmp_path, *TINY, "--data", data, "--checkpoint", tmp_path / "imagenet.pt"]
    done = ringrun(3, *arguments, flags=["--elastic"])
    assert "rank 1 of 3 failed" in done.stderr
    lines, (whole, _) = curve(done.stdout), straight(3)
    assert lines[:2] == whole[:2]
    assert [line[:12] for line in lines[:6]] == [
        *["epoch 0.250:", "epoch 0.500:"],
        *["epoch 0.667:", "epoch 0.833:", "epoch 1.000:", "epoch 1 of 2"],
    ]
    assert [line[-7:] for line in lines[1:3]] == ["3 ranks", "2 ranks"]
    losses, expected = (float(re.search(r"loss ([\d.]+)", each[-1])[1]) for each in (lines, whole))
    assert losses == pytest.approx(expected, rel=0.2)
    seen = collections.Counter(line for file in tmp_path.glob("[0-9]*") for line in file.read_text().splitlines())
    assert set(seen) == {f"{epoch} {index}" for epoch in range(2) for index in range(48)}
    assert seen.total() == 2 * 48 + 12, "but for the step that was lost, each once"


@on_a_pool
@pytest.mark.parametrize("size", [2, 3])
def test_validation_is_that_of_one_process_however_many_images_each_rank_has(world, examples, size):
    def program():
        sys.path.insert(0, str(examples))
        import argparse

        import torch
        import train_imagenet

        rng = np.random.default_rng(0)
        items = [
            (train_imagenet.Image.fromarray(rng.integers(256, size=(9, 8, 3), dtype=np.uint8)), number % 3)
            for number in range(7)
        ]
        model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        args = argparse.Namespace(batch=2, workers=0)
        found = train_imagenet.validate(model, train_imagenet.Images(items, 6, False), args, torch.device("cpu"))
        images = [train_imagenet.Images(items, 6, False)[number] for number in range(7)]
        scores = train_imagenet.scores_of(model, torch.stack([image for image, _ in images]), torch.device("cpu"))
        labels = torch.tensor([label for _, label in images])
        loss = torch.nn.functional.cross_entropy(scores, labels).item()
        return found, [loss, (scores.argmax(1) == labels).float().mean().item()], rr.size()

    for found, expected, ranks in world(size).run(program):
        assert found == pytest.approx(expected, rel=1e-5)
        assert ranks == size
