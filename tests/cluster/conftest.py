"""Fixtures: hosts, a Slurm on hosts, and a Python with each MPI. What a machine cannot have is skipped there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts, why_not
from tests.cluster.slurm import SLURM_NEEDED, start_slurm


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What hosts see of /tmp: the folders of the tests."""
    return [tmp_path_factory.getbasetemp()]


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


@pytest.fixture(params=["openmpi", "mpich"])
def python(request: pytest.FixtureRequest, shared: list[Path]) -> Path:
    """An interpreter whose mpi4py loads this MPI."""
    if request.param == "openmpi":
        return Path(sys.executable)
    found: Path = request.getfixturevalue("mpich_python")
    shared.append(found.parents[1])
    return found
