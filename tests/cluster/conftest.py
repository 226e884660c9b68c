"""Fixtures: hosts, a Slurm on hosts, and a Python with each MPI. What a machine cannot have is skipped there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.cluster.slurm import SLURM_NEEDED, start_slurm
from tests.tiers import extended


@pytest.fixture(params=["openmpi", pytest.param("mpich", marks=extended)])
def python(request: pytest.FixtureRequest) -> Path:
    """An interpreter whose mpi4py loads this MPI."""
    if request.param == "openmpi":
        return Path(sys.executable)
    return request.getfixturevalue("mpich_python")


@pytest.fixture
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What hosts see of /tmp beside this project: the folders of the tests, and the test's environments."""
    pythons = [request.getfixturevalue(name) for name in ("python", "mpich_python") if name in request.fixturenames]
    return [tmp_path_factory.getbasetemp(), *(each.parents[1] for each in pythons)]


@pytest.fixture
def hosts(tmp_path: Path, shared: list[Path]) -> Iterator[Hosts]:
    """Four hosts, h0 to h3."""
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(4, tmp_path / "hosts", shared) as made:
        yield made


@pytest.fixture
def slurm(tmp_path: Path, shared: list[Path]) -> Iterator[Hosts]:
    """Two hosts, h0 and h1, with two CPUs each, as nodes of a Slurm."""
    if reason := why_not(SLURM_NEEDED):
        pytest.skip(reason)
    with Hosts(2, tmp_path / "hosts", shared) as made:
        start_slurm(made)
        yield made
