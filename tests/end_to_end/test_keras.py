"""ringreduce.keras and ringreduce.tensorflow in an environment with Keras, TensorFlow and JAX."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ringrun
from tests.end_to_end.test_mpi_suite import PYTEST
from tests.support import environments, jobs
from tests.support.jobs import ROOT
from tests.support.pages import blocks

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def with_keras():
    """PYTHONPATH with the frameworks, for the Python that runs the tests, whose MPI they use."""
    packages = ["keras", "tensorflow-cpu", "jax", "optax"]
    python = environments.interpreter("TEST_KERAS_PYTHON", ".venv-test-keras", *packages)
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_suite_of_tensorflow(with_keras, ranks):
    suite_passes(ranks, "tests/tensorflow", with_keras)


@pytest.mark.parametrize(("backend", "ranks"), [("torch", 2), ("torch", 3), ("jax", 2), ("tensorflow", 2)])
def test_the_suite_of_keras(with_keras, backend, ranks):
    suite_passes(ranks, "tests/keras", with_keras | {"KERAS_BACKEND": backend})


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_the_example(with_keras, backend, tmp_path):
    path = tmp_path / "digits.keras"
    arguments = [ROOT / "examples" / "keras3.py", "--save", path]
    finished = ringrun(Path(sys.executable), 2, *arguments, **with_keras, KERAS_BACKEND=backend)
    assert finished.returncode == 0, finished.stdout
    assert float(re.search(r"^\[0\] test accuracy: (\d\.\d{3})$", finished.stdout, re.MULTILINE)[1]) >= 0.95
    assert path.exists()


@pytest.mark.parametrize(("backend", "killed"), [("torch", 0), ("jax", 2), ("tensorflow", 1)])
def test_fit_goes_on_without_a_rank_that_is_killed(with_keras, backend, killed):
    program = ["-m", "tests.keras.elastic_program", killed, 3]
    command = [jobs.ringrun(Path(sys.executable)), "--elastic", "-np", 3, "--min-np", 2, sys.executable, *program]
    environment = jobs.environment(**with_keras, KERAS_BACKEND=backend)
    ended = jobs.run(command, env=environment, stderr=subprocess.STDOUT)
    assert ended.returncode == 0, ended.stdout
    left = [rank for rank in range(3) if rank != killed]
    assert f"replayed {[[0, 1, 2]] * 3 + [left] * 4}, epochs: 1" in ended.stdout


@pytest.mark.parametrize("page", ["keras.md", "tensorflow.md"])
def test_the_tutorials_script(with_keras, page, tmp_path):
    (script,) = blocks("python", page=page, title="train.py")
    (tmp_path / "recipe.py").write_text(script.text)
    finished = ringrun(Path(sys.executable), 2, tmp_path / "recipe.py", **with_keras)
    assert finished.returncode == 0, finished.stdout


def suite_passes(ranks, folder, variables):
    finished = ringrun(Path(sys.executable), ranks, *PYTEST, "-W", "default", folder, timeout_s=600, **variables)
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout
    assert re.search(r"^\[0\] \d{2,} passed", finished.stdout, re.MULTILINE), finished.stdout
