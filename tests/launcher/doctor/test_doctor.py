"""ringrun doctor on one host, its schedule, its figures and its job; across hosts: tests/cluster/test_doctor.py."""

import contextlib
import itertools
import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringrun.doctor.command import _ways, job_of, measure, parse
from ringrun.doctor.links import WIDTH, Link, Links, findings, matrix, read_links, rounds
from ringrun.errors import UsageError
from ringrun.job.plan import run_module


def all_links(hosts, gbit_s=10.0, latency_us=20.0, **changes):
    """Equal links between all hosts, but for `changes`: n1_n2=(Gbit/s, µs)."""
    links = []
    for one, other in itertools.combinations(range(len(hosts)), 2):
        figures = changes.get(f"{hosts[one]}_{hosts[other]}", (gbit_s, latency_us))
        links.append(Link(one, other, *figures))
    return Links(hosts, links)


def names(count):
    return [f"n{number}" for number in range(count)]


# the schedule


@given(st.integers(0, 65))
def test_every_pair_once_and_no_host_in_two_at_a_time(count):
    found = rounds(count)
    assert sorted(itertools.chain.from_iterable(found)) == list(itertools.combinations(range(count), 2))
    for pairs in found:
        busy = list(itertools.chain.from_iterable(pairs))
        assert len(busy) == len(set(busy))
    if count > 1:
        assert len(found) == count - 1 + count % 2  # the least there can be


# the figures


def test_the_worker_s_lines():
    lines = [
        "a rank's own words",
        '[0] {"link": [0, 2]}',
        '[ 1] {"link": [1, 2], "latency_us": 20.5, "gbit_s": 9.25}',
        '[0] {"link": [0, 2], "latency_us": 21, "gbit_s": 9}',
        '[0] {"link": [0, 1]}',
        '[0] {"link": [0, 7]}',
        '[0] {"link": "no"}',
    ]
    links = read_links(lines, names(3))
    assert [(link.one, link.other, link.is_measured) for link in links.links] == [
        (0, 1, False),
        (0, 2, True),
        (1, 2, True),
    ]
    assert links.links[1] == Link(0, 2, 9.0, 21.0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["link", "gbit_s", "x"]), inner),
)
any_line = st.text(max_size=30) | json_values.map(json.dumps)


@given(st.lists(any_line, max_size=5), st.integers(2, 5))
def test_any_lines_give_links_and_text(lines, count):
    links = read_links(lines, names(count))
    assert len(links.links) <= count * (count - 1) // 2
    assert matrix(links)


def test_equal_links_are_well():
    for count in (2, 3, 5):
        assert findings(all_links(names(count))) == []


def test_one_slow_link_and_one_late_one():
    slow, late = findings(all_links(names(4), n0_n1=(4.9, 20.0), n2_n3=(10.0, 900.0)))
    assert slow.startswith(
        "n0 – n1: slow: 4.9 Gbit/s (typical here: 10); check what lies between the two: switch ports"
    )
    assert late.startswith(
        "n2 – n3: high-latency: 900 µs (typical here: 20); check the route between the two (ping, traceroute)"
    )


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_host_of_which_all_links_are_slow_is_told_once(count):
    bad = {f"n0_n{other}": (0.9 + other / 100, 20.0) for other in range(1, count)}
    (line,) = findings(all_links(names(count), **bad))
    assert line.startswith(
        f"n0: all its links are slow: 0.91 to {0.9 + (count - 1) / 100:.3g} Gbit/s (typical here: 10)"
    )
    assert "ethtool" in line


def test_links_of_which_all_are_bad_are_told_by_host():
    worse = {f"n{one}_n{other}": (0.05, 20.0) for one, other in ((0, 2), (1, 2), (2, 3))}
    for bad, told in (({}, ["n0", "n1", "n2"]), (worse, ["n2", "n0", "n1"])):
        lines = findings(all_links(names(4), gbit_s=0.1, **bad))
        assert [line.partition(":")[0] for line in lines] == told, "each link is in one line, the worst host's first"


def test_what_a_step_takes_by_each_way_to_send_less():
    links = all_links(names(4), gbit_s=0.1, n1_n3=(0.08, 20.0))
    heading, _, *rows = _ways(4.0, 0.05, links).splitlines()
    assert heading == "A step of 0.05 s of computing and 4 MB of gradients, over 0.08 Gbit/s between 4 hosts:"
    found = {row[:27].strip(): row[27:].split() for row in rows}
    assert found["fp32"] == ["6", "MB", "0.65", "s", "1"]  # 6 MB are 48 Mbit: 0.6 s
    assert found["int8"] == ["1.512", "MB", "0.201", "s", "3.23"]
    assert found["LocalSGD(sync_every=8)"] == ["0.75", "MB", "0.125", "s", "5.2"]
    assert found["DiLoCo(sync_every=20, int4)"][2:] == ["0.05", "s", "13"]  # beside computing
    assert found["nothing sent"] == ["0", "MB", "0.05", "s", "13"]


@pytest.mark.parametrize("flags", [["--gradients", "5"], ["--computing", "5"]])
def test_a_step_is_described_by_both_numbers(flags):
    with pytest.raises(UsageError, match=r"together, as in: --gradients 500 --computing 0\.3"):
        parse(flags)


def test_a_step_s_numbers_are_above_0():
    with pytest.raises(UsageError, match=r"--gradients: expected a number of MB above 0, got '0'"):
        parse(["--gradients", "0", "--computing", "1"])


class Walked(list):
    """A list that counts how often it is walked through."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_the_links_of_many_hosts_are_walked_a_few_times_and_not_once_a_link():
    links = all_links(names(24), n0_n1=(0.1, 20.0), n2_n3=(10.0, 900.0))
    walked = Walked(links.links)
    links = Links(links.hosts, walked)
    assert len(findings(links)) == 2
    assert matrix(links)
    assert walked.walks < 10


def test_a_single_link_that_no_network_of_these_days_would_have():
    assert findings(all_links(names(2), gbit_s=0.094))[0].startswith("n0 – n1: slow: 0.094 Gbit/s")


def test_a_link_that_hangs_is_told():
    (line,) = findings(all_links(names(4), n1_n2=(math.nan, math.nan)))
    assert line.startswith(
        "n1 – n2: not measured completely; check that no firewall blocks TCP between the two on any port"
    )


def test_the_matrix():
    links = all_links(["n1.lab", "n2.lab", "n3.lab"], **{"n1.lab_n3.lab": (1.02, 2000.0)})
    hanging = Links(links.hosts, [*links.links[:2], Link(1, 2)])
    assert matrix(hanging).splitlines() == [
        "Gbit/s     n1      n2      n3",
        "n1          ·      10    1.02*",
        "n2         10       ·       -",
        "n3       1.02*      -       ·",
        "",
        "µs         n1      n2      n3",
        "n1          ·      20    2000*",
        "n2         20       ·       -",
        "n3       2000*      -       ·",
    ]


def test_of_many_hosts_the_typical_link_is_told():
    assert matrix(all_links(names(64), n0_n1=(1.5, 20.0))) == "2016 links measured; typical are 10 Gbit/s and 20 µs"
    assert matrix(Links(names(64), [Link(0, 1)])) == "no link could be measured completely"


host_names = st.lists(st.from_regex(r"[a-z0-9][a-z0-9.-]{0,40}", fullmatch=True), min_size=2, max_size=20, unique=True)


@given(host_names, st.floats(1e-6, 1e3), st.floats(0.1, 1e7))
def test_no_matrix_is_wider_than_a_terminal(hosts, gbit_s, latency_us):
    for line in matrix(all_links(hosts, gbit_s, latency_us)).splitlines():
        assert len(line) <= WIDTH


# the job


def test_the_command_of_the_job():
    argv = job_of(["h1", "fe80::1"], ["--ssh-port", "22"], 60.0)
    flags = ["-np", "2", "-H", "h1:1,[fe80::1]:1", "--timeout", "60", "--no-bind", "--ssh-port", "22"]
    assert argv[: argv.index("22") + 1] == [sys.executable, *run_module("ringrun"), *flags]
    assert argv[argv.index("22") + 1 :] == [sys.executable, *run_module("ringrun.doctor.worker")]


@pytest.mark.parametrize("count", [2, 3])
def test_the_links_between_ranks_of_one_host(count):
    """Each rank plays a host."""
    argv = job_of(names(count), [], 60.0)
    argv[argv.index("-H") + 1] = f"localhost:{count}"
    lines, failure = measure(argv, 60.0)
    assert failure == ""
    links = read_links(lines, names(count))
    assert len(links.measured) == count * (count - 1) // 2
    for link in links.measured:
        assert 0.001 < link.gbit_s < 10000
        assert 0.01 < link.latency_us < 1e6


def test_a_job_that_fails_says_how():
    lines, failure = measure(job_of(["no-such-host.invalid", "neither.invalid"], ["--start-timeout", "5"], 35.0), 35.0)
    assert lines == []
    assert failure.startswith("ringrun: error: ")
    assert "no-such-host.invalid" in failure
    assert len(failure.splitlines()) <= 12


# the command line


def test_one_host_has_no_links(ringrun):
    done = ringrun("doctor", env={"SLURM_JOB_NODELIST": None})
    assert (done.returncode, done.stderr) == (0, "ringrun: asking 1 host …\n")
    header, row, *rest = done.stdout.splitlines()
    assert header.split() == ["host", "Python", "ringreduce", "mpi4py", "NumPy", "MPI", "ranks", "clock", "/dev/shm"]
    assert row.startswith("localhost (here)  {}.{}.{} ".format(*sys.version_info[:3]))
    assert rest == [
        "",
        "One host: there is no link to measure. Name several with -H n1,n2 or --hostfile.",
        "",
        "0 errors, 0 warnings",
    ]


def test_a_host_that_cannot_be_reached(ringrun):
    done = ringrun("doctor", "-H", "localhost,no-such-host.invalid", "--start-timeout", "20", returncode=3)
    assert "\nno-such-host.invalid *  its name is not known here (Could not resolve hostname: " in done.stdout
    assert "\nErrors:\n  no-such-host.invalid: its name is not known here (Could not resolve hostname: " in done.stdout
    assert "; correct the name, or make it known here: getent hosts no-such-host.invalid" in done.stdout
    links = "\nThe links are not measured: that requires two hosts without errors.\n"
    assert f"{links}\n1 error, 0 warnings\n" in done.stdout


def test_the_hosts_of_a_batch_system(monkeypatch):
    assert [str(host) for host in parse([]).found.hosts] == ["localhost"]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    found = parse([]).found
    assert ([str(host) for host in found.hosts], found.in_slurm) == (["n1", "n2", "n3"], True)
    assert parse(["-H", "n1,n3"]).found.in_slurm
    assert not parse(["-H", "n1,n4"]).found.in_slurm


@given(st.lists(st.sampled_from(["-H", "-p", "-i", "h1:2", "", "22", "--start-timeout", "1e3", "\0", "--"])))
def test_any_command_line_is_a_request_or_a_usage_error(arguments):
    with contextlib.suppress(UsageError):
        assert parse(arguments).found.hosts


def test_the_manual(ringrun):
    done = ringrun("doctor", "--help", returncode=0)
    for flag in ("-H", "--hostfile", "-p", "-i", "--start-timeout", "--network-interfaces"):
        assert flag in done.stdout
