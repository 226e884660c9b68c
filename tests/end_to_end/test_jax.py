"""ringreduce.jax in an environment with JAX: tests/jax on 1, 2, 3 and 4 ranks."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.conftest import ringrun
from tests.end_to_end.test_mpi_suite import PYTEST
from tests.support import environments
from tests.support.jobs import ROOT

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def with_jax():
    """PYTHONPATH with JAX, optax, equinox and flax, for the Python that runs the tests, whose MPI they use."""
    python = environments.interpreter("TEST_JAX_PYTHON", ".venv-test-jax", "jax", "optax", "equinox", "flax")
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return {"PYTHONPATH": subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_suite_passes_on_so_many_ranks(with_jax, ranks):
    finished = ringrun(Path(sys.executable), ranks, *PYTEST, "tests/jax", timeout_s=600, **with_jax)
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout
    assert re.search(r"^\[0\] \d{2,} passed", finished.stdout, re.MULTILINE), finished.stdout


def test_the_example_trains_the_same_model_on_any_number_of_ranks(with_jax, tmp_path):
    trained, accuracies = [], []
    for ranks in (1, 2, 3, 4):
        for steps in (50, 300):
            record = tmp_path / f"{ranks}-{steps}.npz"
            arguments = [ROOT / "examples" / "jax_optax.py", "--steps", steps, "--record", record]
            finished = ringrun(Path(sys.executable), ranks, *arguments, **with_jax)
            assert finished.returncode == 0, finished.stdout
            if steps == 50:
                trained.append(list(np.load(record).values()))
        accuracies.append(float(re.search(r"test accuracy: (\d\.\d{3})", finished.stdout)[1]))
    assert min(accuracies) >= 0.95
    for params in trained[1:]:
        for mine, alone in zip(params, trained[0], strict=True):
            np.testing.assert_allclose(mine, alone, atol=1e-5)


CACHED = """
import jax, jax.numpy as jnp
import ringreduce.jax as hvd

hvd.init()
channels = hvd.ordered(), hvd.ordered()

@jax.jit
def program(x):
    return [hvd.allreduce(x * number, op=hvd.Sum, process_set=each) for number, each in enumerate(channels, 1)]

sums = [each.item() for each in program(jnp.float32(1 + hvd.rank()))]
print(f"sums {sums}")
"""


def test_programs_find_their_collectives_beside_jax_s_cache(with_jax, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(CACHED)
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for _ in range(2):
        done = ringrun(Path(sys.executable), 2, script, **with_jax, **cache)
        assert done.stdout.count("sums [3.0, 6.0]") == 2, done.stdout
