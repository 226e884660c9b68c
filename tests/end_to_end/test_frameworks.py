"""ringreduce.jax, .keras and .tensorflow in an environment that has all three: their suites and their examples."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.conftest import PROGRAMS, ringrun
from tests.end_to_end.test_mpi_suite import PYTEST
from tests.support import jobs
from tests.support.jobs import ROOT

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("frameworks")]
PYTHON = Path(sys.executable)
EVERYWHERE = [
    *(("jax", "jax", ranks) for ranks in (1, 2, 3, 4)),
    *(("tensorflow", "tensorflow", ranks) for ranks in (1, 2, 3)),
    *(("keras", backend, ranks) for backend, ranks in [("torch", 2), ("torch", 3), ("jax", 2), ("tensorflow", 2)]),
]


def passes(ranks, arguments, variables):
    """Run pytest on so many ranks. Warnings are errors in JAX's suite: Keras and TensorFlow warn of themselves."""
    warnings = [] if arguments[-2:] == ["", "tests/jax"] else ["-W", "default"]
    finished = ringrun(PYTHON, ranks, *PYTEST, *warnings, *arguments, timeout_s=600, returncode=0, **variables)
    print(finished.stdout)
    assert re.search(r"^\[0\] \d{2,} passed", finished.stdout, re.MULTILINE), finished.stdout


@pytest.mark.adapters
def test_what_is_marked_quick_in_the_suites(frameworks):
    """In one job: each takes seconds to import its framework."""
    folders = ["tests/jax", "tests/keras", "tests/tensorflow"]
    passes(
        2, ["-m", "quick and not extended", "--durations=12", *folders], frameworks | {"KERAS_BACKEND": "tensorflow"}
    )


@pytest.mark.parametrize(("folder", "backend", "ranks"), EVERYWHERE)
def test_a_suite_on_so_many_ranks(frameworks, folder, backend, ranks):
    passes(ranks, ["-m", "", f"tests/{folder}"], frameworks | {"KERAS_BACKEND": backend})


def test_the_example_of_jax_trains_the_same_model_on_any_number_of_ranks(frameworks, tmp_path):
    trained, accuracies = [], []
    for ranks in (1, 2, 3, 4):
        for steps in (50, 300):
            record = tmp_path / f"{ranks}-{steps}.npz"
            arguments = [ROOT / "examples" / "jax_optax.py", "--steps", steps, "--record", record]
            finished = ringrun(PYTHON, ranks, *arguments, returncode=0, **frameworks)
            if steps == 50:
                trained.append(list(np.load(record).values()))
        accuracies.append(float(re.search(r"test accuracy: (\d\.\d{3})", finished.stdout)[1]))
    assert min(accuracies) >= 0.95
    for params in trained[1:]:
        for mine, alone in zip(params, trained[0], strict=True):
            np.testing.assert_allclose(mine, alone, atol=1e-5)


def test_the_bench_of_a_step_of_jax(frameworks):
    done = ringrun(PYTHON, 2, ROOT / "bench" / "jax_step.py", timeout_s=300, returncode=0, **frameworks)
    rows = re.findall(r"^\[0\] (\w+) +(jax|hvd)\.jit( +\d+\.\d\d){5}$", done.stdout, re.MULTILINE)
    assert [row[:2] for row in rows] == [(model, kind) for model in ("digits", "gpt") for kind in ("jax", "hvd")]


def test_programs_find_their_collectives_beside_jax_s_cache(frameworks, tmp_path):
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for _ in range(2):
        done = ringrun(PYTHON, 2, PROGRAMS / "jax_channels.py", **frameworks, **cache)
        assert done.stdout.count("sums [3.0, 6.0]") == 2, done.stdout


@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_the_example_of_keras(frameworks, backend, tmp_path):
    path = tmp_path / "digits.keras"
    arguments = [ROOT / "examples" / "keras3.py", "--save", path]
    finished = ringrun(PYTHON, 2, *arguments, returncode=0, **frameworks, KERAS_BACKEND=backend)
    assert float(re.search(r"^\[0\] test accuracy: (\d\.\d{3})$", finished.stdout, re.MULTILINE)[1]) >= 0.95
    assert path.exists()


@pytest.mark.parametrize(("backend", "killed"), [("torch", 0), ("jax", 2), ("tensorflow", 1)])
def test_fit_goes_on_without_a_rank_that_is_killed(frameworks, backend, killed):
    program = ["-m", "tests.keras.elastic_program", killed, 3]
    command = [jobs.ringrun(PYTHON), "--elastic", "-np", 3, "--min-np", 2, PYTHON, *program]
    environment = jobs.environment(**frameworks, KERAS_BACKEND=backend)
    ended = jobs.run(command, env=environment, stderr=subprocess.STDOUT, returncode=0)
    left = [rank for rank in range(3) if rank != killed]
    assert f"replayed {[[0, 1, 2]] * 3 + [left] * 4}, epochs: 1" in ended.stdout


@pytest.mark.parametrize(("killed", "kind"), [(1, []), (0, ["variables"])], ids=["a model", "variables"])
def test_horovods_elastic_loop_for_tensorflow_goes_on_without_a_rank_that_is_killed(frameworks, killed, kind):
    program = ["-m", "tests.tensorflow.elastic_program", killed, 3, *kind]
    command = [jobs.ringrun(PYTHON), "--elastic", "-np", 3, "--min-np", 2, PYTHON, *program]
    ended = jobs.run(command, env=jobs.environment(**frameworks), stderr=subprocess.STDOUT, returncode=0)
    left = [rank for rank in range(3) if rank != killed]
    assert f"replayed {[[0, 1, 2]] * 3 + [left] * 4}, resets: 1" in ended.stdout


def test_horovods_elastic_loop_for_keras_2_goes_on_without_a_rank_that_is_killed(frameworks, tmp_path):
    program = ["-m", "tests.tensorflow.keras_2_program", 1, 3, tmp_path / "model.h5"]
    command = [jobs.ringrun(PYTHON), "--horovod", "--elastic", "-np", 3, "--min-np", 2, PYTHON, *program]
    environment = jobs.environment(**frameworks, TF_USE_LEGACY_KERAS="1")
    ended = jobs.run(command, env=environment, stderr=subprocess.STDOUT, returncode=0)
    assert f"replayed {[[0, 1, 2]] * 3 + [[0, 2]] * 4}, epochs: 1, resets: 1" in ended.stdout
    assert "model.h5: HDF5 does not keep the options of DistributedOptimizer" in ended.stdout


SERVICES = {
    "one dispatcher, in turns": (["--dispatchers", 1], ["turns"]),
    "one dispatcher, first come": (["--dispatchers", 1], ["reuse"]),
    "a dispatcher each": (["--dispatchers", 2], []),
    "on the side that trains": (["--dispatchers", 1, "--dispatcher-side", "training"], []),
    "each on the side that trains": (["--dispatchers", 2, "--dispatcher-side", "training"], []),
}


@pytest.mark.parametrize(("service", "reading"), SERVICES.values(), ids=SERVICES)
def test_ranks_train_on_data_that_other_ranks_prepare(frameworks, tmp_path, service, reading):
    path, environment = tmp_path / "service.json", jobs.environment(**frameworks)
    worker = ["-m", "horovod.tensorflow.data.compute_worker", path, *service, "--timeout", 300]
    command = [jobs.ringrun(PYTHON), "--horovod", "-np", 2, PYTHON, *worker]
    with subprocess.Popen(list(map(str, command)), env=environment, cwd=ROOT) as prepares:
        try:
            training = [PROGRAMS / "trains_on_a_service.py", path, *reading]
            trained = ringrun(PYTHON, 2, *training, returncode=0, timeout_s=400, **frameworks, RINGREDUCE_HOROVOD="1")
            assert prepares.wait(100) == 0
        finally:
            prepares.terminate()
    side, rows = "training" if "training" in service else "compute", [32, 32] if reading else [64, 64]
    assert f"[0] {side}: {rows}\n" in trained.stdout, trained.stdout
