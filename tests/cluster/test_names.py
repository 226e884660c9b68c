"""Names of hosts that are not what the hosts call themselves, on both MPIs: each rank is where it was asked for."""

from tests.cluster.hosts import PROGRAMS

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


def test_one_machine_under_several_names_is_one_host(own_hosts, python):
    own_hosts.rename({}, {0: ["h0-ib"], 1: ["h1-ib", "h1.lan"]})
    done = ringrun(own_hosts, python, "h1:1,h0-ib:1,h1-ib:1,10.77.0.2:1,h0:1", returncode=0)
    assert places(done) == [("h1", 0, 3), ("h1", 1, 3), ("h1", 2, 3), ("h0", 0, 2), ("h0", 1, 2)]
    assert (
        "ringrun: h1, h1-ib, 10.77.0.2 are one machine, which calls itself h1: taken for one host, h1:3\n"
        in done.stderr
    )
    assert "ringrun: h0-ib, h0 are one machine, which calls itself h0: taken for one host, h0:2\n" in done.stderr
    done = ringrun(own_hosts, python, "h1.lan:1,h1:1", returncode=0)
    assert places(done) == [("h1", 0, 2), ("h1", 1, 2)]
