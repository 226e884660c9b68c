"""`mpirun -np 4 pytest tests/mpi` as it stands there, without ringrun: the plugin for MPI is switched on by itself."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run
from tests.support.jobs import ROOT
from tests.support.tiers import extended

pytestmark = [pytest.mark.timeout(600), pytest.mark.adapters]
ALLOWED = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MORE_RANKS_THAN_CORES = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}


def mpirun(python, ranks, *arguments, **variables):
    """`mpirun -np RANKS pytest ARGUMENTS` with the commands that stand beside `python`."""
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    pytest = (
        ["pytest"] if python.with_name("pytest").exists() else ["python", "-m", "pytest"]
    )  # support/environments.py
    command = ["mpirun", "-np", str(ranks), *pytest, "-p", "no:cacheprovider", "--color=no", *arguments]
    return run(command, PATH=path, timeout_s=500, **ALLOWED, **MORE_RANKS_THAN_CORES, **variables)


@pytest.mark.parametrize(
    ("python", "ranks", "words"),
    [
        ("openmpi", 2, "world"),  # what else works: test_mpi_suite
        *(pytest.param(mpi, 4, "world or collectives", marks=extended) for mpi in ("openmpi", "mpich")),
    ],
    indirect=["python"],
)
def test_the_suite_for_ranks(python, ranks, words):
    finished = mpirun(python, ranks, "tests/mpi", "-k", words, returncode=0)
    assert len(re.findall(r"^=+ \d+ passed", finished.stdout, re.MULTILINE)) == 1, "one rank reports"


@pytest.mark.extended
def test_without_a_path_ranks_run_what_is_for_ranks(python):
    finished = mpirun(python, 2, "--collect-only", "-q")
    folders = set(re.findall(r"^(tests/\w+)/.*::", finished.stdout, re.MULTILINE))
    assert folders == {"tests/mpi", "tests/gpu"}, finished.stdout


def test_a_rank_that_fails_ends_the_job(python, broken):
    finished = mpirun(python, 2, "-c", "pyproject.toml", "--with-mpi", f"{broken}::test_one_rank_fails")
    assert finished.returncode != 0
    assert re.search(r"^rank 1 of 2: .*test_one_rank_fails failed", finished.stdout, re.MULTILINE), finished.stdout


def test_pytest_without_the_plugin_for_mpi(tmp_path):
    """It is needed for ranks only."""
    command = [Path(sys.executable).parent / "pytest", "-p", "no:pytest_mpi", "-p", "no:cacheprovider", "-q"]
    run([*command, "-o", "addopts=--import-mode=importlib", "tests/unit/arrays/test_trees.py"], cwd=ROOT, returncode=0)
