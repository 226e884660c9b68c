"""`ringrun scaling` finds the steps and the examples of each of these scripts, and what it holds equal."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.support import jobs

GPT = ["--batch=12", "--width=16", "--depth=2", "--heads=2", "--context=16", "--save-every=1000000"]
IMAGENET = ["--model=resnet18", "--pixels=32", "--batch=4"]
EXAMPLES = {
    "train_digits.py": (["--epochs=1000000"], "global batch", 120),
    "numpy_lenet.py": ([], "global batch", 32),
    "train_gpt.py": (["--steps=1000000", *GPT], "global batch", 12),
    "train_imagenet.py": (["--epochs=1000000", *IMAGENET], "batch per rank", 4),
    "torch_ddp.py": (["--epochs=1000000"], "global batch", 32),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_steps_and_examples_are_found(name, examples, tmp_path):
    arguments, held, batch = EXAMPLES[name]
    for needed in ("sklearn", "torch"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"it needs {needed}")
    ringrun = [jobs.ringrun(Path(sys.executable)), "scaling", "-np", "1,2", "--rounds", 1]
    command = [*ringrun, "--seconds", 20, "--steps", 5, "--json", "s.json", sys.executable, examples / name, *arguments]
    done = jobs.run(command, cwd=tmp_path, timeout_s=280, returncode=0)
    document = json.loads((tmp_path / "s.json").read_text())
    assert document["held"] == held, done.stdout
    assert document["sizes"][0]["runs"][0]["examples"] == pytest.approx(batch, rel=0.05)
