"""The commands of docs/clusters.md, run as printed. That for Kubernetes: tests/launcher/hosts/test_mpijob.py."""

import re
import shlex

import pytest

from tests.support.cluster.hosts import ROOT
from tests.support.pages import blocks

pytestmark = pytest.mark.timeout(300)

SSH, SLURM, JOIN, *_ = (block.text for block in blocks("bash", page="clusters.md"))


def run(hosts, python, commands):
    """Run shell commands on host 0 as a user who has activated the environment, in a folder like a clone's."""
    folder = hosts.folder / "clone"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    path = f"export PATH={shlex.quote(str(python.parent))}:$PATH"
    done = hosts.run(0, ["bash", "-c", f"set -e\n{path}\ncd {shlex.quote(str(folder))}\n{commands}"], timeout=200)
    hosts.wait_until_gone()
    assert done.returncode == 0, done.stderr
    return done


def accuracies(text):
    return [float(number) for number in re.findall(r"test accuracy: ([\d.]+)$", text, re.MULTILINE)]


def test_over_ssh(hosts, python):
    found = accuracies(run(hosts, python, SSH).stdout)
    assert len(found) == 2
    assert min(found) >= 0.97


def test_without_ssh(nodes, python):
    (accuracy,) = accuracies(run(nodes, python, JOIN).stdout)
    assert accuracy >= 0.97


def test_in_slurm(slurm, python):
    lines = [line for line in SLURM.splitlines() if " srun " not in line]
    assert len(lines) == 2
    done = run(slurm, python, "\n".join(lines))
    found = accuracies(done.stdout) + accuracies((slurm.folder / "clone" / "train.log").read_text())
    assert len(found) == 2
    assert min(found) >= 0.97


def test_with_srun_alone_on_mpich(slurm, mpich_python):
    (line,) = [line for line in SLURM.splitlines() if " srun " in line]
    (accuracy,) = accuracies(run(slurm, mpich_python, line).stdout)
    assert accuracy >= 0.97
