"""Fixtures: hosts, a Slurm on hosts, and a Python with each MPI. What a machine cannot have is skipped there."""

import os
import shutil
from pathlib import Path

import pytest

from tests.support.cluster.hosts import PATH, Hosts, why_not
from tests.support.cluster.slurm import SLURM_NEEDED, start_slurm, wait_until_idle


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """What hosts see of /tmp beside this project: the tests' folders, and environments that stand elsewhere."""
    pythons = filter(None, map(os.environ.get, ("TEST_MPICH_PYTHON", "TEST_ENGINES_PYTHON")))
    return [tmp_path_factory.getbasetemp(), *(Path(each).parents[1] for each in pythons)]


def four_hosts(folder, shared):
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(4, folder, shared) as made:
        yield made


def two_nodes(folder, shared):
    if reason := why_not(SLURM_NEEDED):
        pytest.skip(reason)
    with Hosts(2, folder, shared) as made:
        start_slurm(made)
        for k in range(2):
            made.stop_sshd(k)
        yield made


def four_nodes(folder, shared):
    """Without sshd, ssh and srun, where only names that a platform gives to hosts are known, and not their own."""
    for made in four_hosts(folder, shared):
        table = "127.0.0.1 localhost\n"
        for k, address in enumerate(made.addresses):
            made.stop_sshd(k)
            for name in ("ssh", "srun"):
                if path := shutil.which(name, path=PATH):
                    made.check(k, ["mount", "--bind", "/dev/null", path])
            table += f"{address} algo-{k + 1} train-{k}.train train-node-0-{k}.train a-workers-0-{k}.a node{k}\n"
        (made.files / "etc" / "hosts").write_text(table)
        yield made


@pytest.fixture(scope="session")
def nodes_of_all(tmp_path_factory, shared):
    yield from four_nodes(tmp_path_factory.mktemp("nodes"), shared)


@pytest.fixture(scope="session")
def hosts_of_all(tmp_path_factory, shared):
    yield from four_hosts(tmp_path_factory.mktemp("hosts"), shared)


@pytest.fixture(scope="session")
def slurm_of_all(tmp_path_factory, shared):
    yield from two_nodes(tmp_path_factory.mktemp("slurm"), shared)


@pytest.fixture
def hosts(hosts_of_all, tmp_path):
    """Four hosts, h0 to h3, the same for all tests: one that changes something about them has `own_hosts`."""
    hosts_of_all.folder = tmp_path
    yield hosts_of_all
    hosts_of_all.tidy_up()


@pytest.fixture
def slurm(slurm_of_all, tmp_path):
    """Two hosts, h0 and h1, with two CPUs each, as nodes of a Slurm, where nobody can log in over ssh."""
    slurm_of_all.folder = tmp_path
    wait_until_idle(slurm_of_all)
    yield slurm_of_all
    slurm_of_all.tidy_up()


@pytest.fixture
def nodes(nodes_of_all, tmp_path):
    """Four hosts that nobody can log in to."""
    nodes_of_all.folder = tmp_path
    yield nodes_of_all
    nodes_of_all.tidy_up()


@pytest.fixture
def own_hosts(tmp_path, shared):
    """Four hosts for one test, which may cut their links, stop their sshd, mount something there."""
    yield from four_hosts(tmp_path / "hosts", shared)


@pytest.fixture
def own_slurm(tmp_path, shared):
    """Two nodes for one test."""
    yield from two_nodes(tmp_path / "hosts", shared)
