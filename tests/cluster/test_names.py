"""Names of hosts that are not what the hosts call themselves, on both MPIs: each rank is where it was asked for."""

import pytest

from tests.support.cluster.hosts import PATH, PROGRAMS
from tests.support.jobs import executable

WHERE = PROGRAMS / "where.py"


def ringrun(hosts, python, listed, **options):
    """An allreduce on these hosts; when it has ended, nothing is left of it."""
    done = hosts.ringrun(python, "-H", listed, python, WHERE, "LOCAL_RANK", "LOCAL_WORLD_SIZE", **options)
    hosts.assert_nothing_is_left()
    return done


def places(done):
    """The host of each rank, its number there, and how many are there, as MPI has them."""
    rows = sorted(line.split()[1:] for line in done.stdout.splitlines())
    assert all(row[2:4] == row[-2:] for row in rows), f"MPI and ringrun differ: {rows}"
    return [(row[1], int(row[2]), int(row[3])) for row in rows]


def test_names_that_differ_behind_the_first_dot_or_begin_alike(own_hosts, python):
    own = {0: "head.lan", 1: "n.rack1.lan", 2: "n.rack2.lan", 3: "n.rack2"}
    own_hosts.rename(own, {k: [name] for k, name in own.items()})
    done = ringrun(own_hosts, python, "n.rack2:1,n.rack2.lan:2,n.rack1.lan:1", returncode=0)
    assert places(done) == [
        ("n.rack2", 0, 1),
        ("n.rack2.lan", 0, 2),
        ("n.rack2.lan", 1, 2),
        ("n.rack1.lan", 0, 1),
    ]
    done = ringrun(own_hosts, python, "n.rack1.lan:1,head.lan:1", returncode=0)
    assert places(done) == [("n.rack1.lan", 0, 1), ("head.lan", 0, 1)]


@pytest.mark.adapters
def test_hosts_call_themselves_otherwise_than_they_are_reached(own_hosts, python):
    """Short here and long there, in capitals, by an address; and nobody knows what they call themselves."""
    own_hosts.rename({0: "ip-10-77-0-1.internal", 1: "ip-10-77-0-2", 2: "other.lan", 3: "h3.lan"}, {3: ["H3"]})
    done = ringrun(own_hosts, python, "h2:1,10.77.0.2:1,H3:2", returncode=0)
    assert places(done) == [("other.lan", 0, 1), ("ip-10-77-0-2", 0, 1), ("h3.lan", 0, 2), ("h3.lan", 1, 2)]
    done = ringrun(own_hosts, python, "h1:1,localhost:1", returncode=0)
    assert places(done) == [("ip-10-77-0-2", 0, 1), ("ip-10-77-0-1.internal", 0, 1)]


def test_hosts_are_named_without_their_domains_or_with_more_than_they_know(own_hosts, python):
    own_hosts.rename({0: "head.lan", 1: "n1.lan", 2: "n2"}, {0: ["head"], 1: ["n1"], 2: ["n2.lan"]})
    done = ringrun(own_hosts, python, "n2.lan:1,head:2,n1:1", returncode=0)
    assert places(done) == [("n2", 0, 1), ("head.lan", 0, 2), ("head.lan", 1, 2), ("n1.lan", 0, 1)]


def six(hosts, *, only):
    """Give hosts 1 and 2 IPv6 addresses, and no others if there are to be `only` those."""
    known = hosts.home / ".ssh" / "known_hosts"
    for k in range(3):
        if only:
            hosts.check(k, ["ip", "addr", "flush", "dev", "eth0", "scope", "global"])
        hosts.check(k, ["ip", "-6", "addr", "add", f"fd00::{k + 1}/64", "dev", "eth0", "nodad"])
        key = (hosts.files / hosts.names[k] / "host_key.pub").read_text()
        known.write_text(f"{known.read_text()}fd00::{k + 1} {key}")


def test_an_ipv6_address_is_one_more_name(own_hosts, python):
    six(own_hosts, only=False)
    done = ringrun(own_hosts, python, "[fd00::2]:1,h1:1,[fd00::1]:1,h2:1", returncode=0)
    assert places(done) == [("h1", 0, 2), ("h1", 1, 2), ("h0", 0, 1), ("h2", 0, 1)]


def test_hosts_with_ipv6_alone(own_hosts, python):
    six(own_hosts, only=True)
    done = ringrun(own_hosts, python, "[fd00::2]:1,[fd00::3]:2")
    if "mpich" in str(python):
        assert (done.returncode, done.stdout) == (3, "")
        assert (
            "ringrun: error: MPICH's launcher supports only IPv4, and the other hosts reach this one at fd"
            in done.stderr
        )
    else:
        assert places(done) == [("h1", 0, 1), ("h2", 0, 2), ("h2", 1, 2)]


def test_one_machine_under_several_names_is_one_host(own_hosts, python):
    own_hosts.rename({}, {0: ["h0-ib"], 1: ["h1-ib", "h1.lan"]})
    done = ringrun(own_hosts, python, "h1:1,h0-ib:1,h1-ib:1,10.77.0.2:1,h0:1", returncode=0)
    assert places(done) == [("h1", 0, 3), ("h1", 1, 3), ("h1", 2, 3), ("h0", 0, 2), ("h0", 1, 2)]
    assert (
        "ringrun: h1, h1-ib, 10.77.0.2 are one machine, which calls itself h1: treated as one host, h1:3\n"
        in done.stderr
    )
    assert "ringrun: h0-ib, h0 are one machine, which calls itself h0: treated as one host, h0:2\n" in done.stderr
    done = ringrun(own_hosts, python, "h1.lan:1,h1:1", returncode=0)
    assert places(done) == [("h1", 0, 2), ("h1", 1, 2)]


def test_two_machines_with_one_name(own_hosts, python):
    """MPICH tells them apart; Open MPI cannot, and no rank starts."""
    own_hosts.rename({1: "ubuntu", 2: "ubuntu"})
    done = ringrun(own_hosts, python, "h0:1,h1:1,h2:1")
    if "mpich" in str(python):
        assert places(done) == [("h0", 0, 1), ("ubuntu", 0, 1), ("ubuntu", 0, 1)]
    else:
        assert (done.returncode, done.stdout) == (3, "")
        assert (
            "ringrun: error: h1 and h2 both call themselves ubuntu, by which Open MPI tells hosts apart; give"
            in done.stderr
        )


SSH_ASTRAY = """\
#!/bin/bash
words=("$@")
for at in "${!words[@]}"; do
    [[ "$*" == *prted* || "$*" == *pmi_proxy* ]] && [ "${words[at]}" = h1 ] && words[at]=h2
done
exec /usr/bin/ssh "${words[@]}"
"""


def test_a_rank_that_mpi_starts_elsewhere_ends_the_start(own_hosts, python):
    """As where a name leads to another machine each time; an ssh does it, for MPI alone."""
    executable(own_hosts.folder / "ssh", SSH_ASTRAY)
    done = ringrun(own_hosts, python, "h0:1,h1:1", env={"PATH": f"{own_hosts.folder}:{PATH}"}, returncode=3)
    assert done.stdout == ""
    where = "rank 1 is to run on h1, but was started on h2"
    cure = "use the name that `hostname` prints on each host"
    assert done.stderr.splitlines()[-1] == f"ringrun: error: {where}; {cure}"
