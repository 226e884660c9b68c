"""`ringrun scaling` over hosts and in a Slurm allocation: they are found as by ringrun, and a slow wire is named."""

import json

from tests.support.cluster.hosts import PROGRAMS

ARGUMENTS = "--rounds", 1, "--seconds", 1, "--json"


def scaling(hosts, python, *arguments, before=()):
    """The JSON of a run on host 0 that succeeds."""
    written = hosts.folder / "scaling.json"
    ringrun = python.parent / "ringrun"
    command = [*before, ringrun, "scaling", *ARGUMENTS, written, *arguments, python, PROGRAMS / "scales.py"]
    hosts.run(0, command, timeout=120, returncode=0)
    return json.loads(written.read_text())


def test_a_slow_wire_between_hosts_is_the_limit(own_hosts, python):
    own_hosts.shape(1, 50)
    hostfile = own_hosts.folder / "hostfile"
    hostfile.write_text("h0 slots=2\nh1 slots=2\n")
    for where in (["-H", "h0:2,h1:2", "-np", "2,4"], ["--hostfile", hostfile]):
        found = scaling(own_hosts, python, *where)
        last = found["sizes"][-1]
        assert (last["size"], last["limit"]) == (4, "all-reduce between hosts")
        assert [run["hosts"] for each in found["sizes"][-2:] for run in each["runs"]] == [1, 2]
        assert any(
            text.startswith("compression=int4, an eighth of the bytes between hosts") for text in found["advice"]
        )
    own_hosts.assert_nothing_is_left()


def test_in_a_slurm_allocation_its_nodes_are_compared(slurm, python):
    found = scaling(slurm, python, before=["salloc", "-N2", "-n4"])
    assert [(each["size"], each["runs"][0]["hosts"]) for each in found["sizes"]] == [(1, 1), (2, 1), (4, 2)]
    assert found["held"] == "batch per rank"
    slurm.assert_nothing_is_left()
