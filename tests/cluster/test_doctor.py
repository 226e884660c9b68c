"""The preflight and ringrun doctor on real hosts: over sshd, and in a Slurm job, on both MPIs."""

import os
import re
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.pages import blocks

NAMES = "h0,h1,h2,h3"


def doctor(hosts, python, *arguments, returncode):
    return hosts.ringrun(python, "doctor", *arguments, timeout=120, returncode=returncode)


def matrix(text, unit):
    """The rows of one of the matrices, by host."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(unit))
    count = len(lines[begin].split()) - 1
    return {line.split()[0]: line.split()[1:] for line in lines[begin + 1 : begin + 1 + count]}


def in_table(text):
    """The hosts in a table, beside which nothing was told but, on a busy machine, for whom ringrun waits."""
    heading, *rows = [line for line in text.splitlines() if not re.match("ringrun: .*, waiting for ", line)]
    assert heading.startswith("host ")
    return [row.split()[0] for row in rows]


@pytest.mark.adapters
def test_four_hosts_of_which_one_has_a_slow_link(python, own_hosts):
    own_hosts.shape(2, 50)
    page = blocks("bash", page="less-on-the-wire.md")[0].text.split()
    assert page[:4] == ["ringrun", "doctor", "-H", NAMES]
    done = doctor(own_hosts, python, *page[2:], returncode=0)
    rows = done.stdout.splitlines()
    assert rows[1].startswith("h0 (here) ")
    assert rows[2].startswith("h[1-3] ")
    rates = matrix(done.stdout, "Gbit/s")
    for name in ("h0", "h1", "h3"):
        assert rates[name][2].endswith("*")  # the link to h2
        assert 0.001 < float(rates[name][2].rstrip("*")) < 0.06
    assert re.search(r"\nLinks:\n  h2: all its links are slow: 0\.0.* Gbit/s \(typical here: ", done.stdout)
    step = r"\n\nA step of 0\.029 s of computing and 4\.24 MB of gradients, over 0\.0\d+ Gbit/s between 4 hosts:\n"
    assert re.search(step + r".*\nfp32 +6\.36 MB +[12]\.\d* s +1\n", done.stdout)
    own_hosts.assert_nothing_is_left()


def test_hosts_that_cannot_be_reached_are_told_with_their_cures_and_the_others_measured(python, own_hosts):
    own_hosts.stop_sshd(1)
    own_hosts.new_host_key(2)
    done = doctor(own_hosts, python, "-H", f"{NAMES},h9", "--start-timeout", "15", returncode=3)
    assert "\n  h1: it refuses the connection (port 22: Connection refused): no ssh server listens" in done.stdout
    assert "start sshd there, or name its port with -p PORT\n" in done.stdout
    assert "\n  h2: its host key has changed since this host saw it last (Host key verif" in done.stdout
    assert '/.ssh/known_hosts" -R "h2"; ssh h2\n' in done.stdout
    assert "\n  h9: its name is not known here (Could not resolve hostname: " in done.stdout
    assert list(matrix(done.stdout, "Gbit/s")) == ["h0", "h3"]
    assert "\n3 errors, " in done.stdout
    own_hosts.assert_nothing_is_left()


def test_a_host_whose_link_is_down_is_given_up(own_hosts):
    own_hosts.link_down(3)
    done = doctor(own_hosts, Path(sys.executable), "-H", "h0,h3", "--start-timeout", "3", returncode=3)
    assert re.search(
        r"\n  h3: it did not answer in time \(.*\); check that h3 is up .*--start-timeout S\n", done.stdout
    )
    own_hosts.assert_nothing_is_left()


def test_a_firewall_between_a_host_and_this_one(python, own_hosts):
    """ssh's answers come from port 22; whatever else h1 would send to h0 is stopped."""
    rule = ["to", own_hosts.addresses[0], "ipproto", "tcp", "sport", "1024-65534", "prohibit"]
    own_hosts.check(1, ["ip", "rule", "add", *rule])
    done = doctor(own_hosts, python, "-H", NAMES, "--start-timeout", "15", returncode=3)
    told = r"\n  h1: no connection from there to this host \(10\.77\.0\.1 port [0-9]+: .*\); let no firewall block TCP"
    assert re.search(told, done.stdout), done.stdout
    assert list(matrix(done.stdout, "Gbit/s")) == ["h0", "h2", "h3"]
    own_hosts.assert_nothing_is_left()


def test_hosts_with_another_installation(own_hosts, mpich_python):
    """h1 has another MPI, h2 no Python where this host has it, h3 little shared memory."""
    python = Path(sys.executable)
    theirs, ours = mpich_python.parents[1] / "lib", python.parents[1] / "lib"
    packages = f"python3.{sys.version_info.minor}"
    own_hosts.check(1, ["mount", "--bind", ours / packages, theirs / packages])  # but for the MPI it has the same
    own_hosts.check(1, ["mount", "--rbind", theirs, ours])
    own_hosts.check(2, ["mount", "-t", "tmpfs", "tmpfs", python.parent])
    own_hosts.check(3, ["mount", "-o", "remount,size=32m", "/dev/shm"])
    done = doctor(own_hosts, python, "-H", NAMES, returncode=3)
    assert re.search(r"\nh1 .* MPICH [0-9.]+\*  ", done.stdout)
    assert re.search(r"\n  h1: MPICH [0-9.]+ there, Open MPI [0-9.]+ on h0; install the same there", done.stdout)
    assert re.search(rf"\n  h2: {python.parent}/python[0-9.]* is not there \(", done.stdout)
    assert re.search(r"\n  h3: /dev/shm has 34 MB free, expected at least 67; remove old files there", done.stdout)
    assert list(matrix(done.stdout, "Gbit/s")) == ["h0", "h3"]
    own_hosts.assert_nothing_is_left()


ANOTHER = """#!/bin/sh
# this Python, but what it says of its version
PYTHONPATH="$PYTHONPATH:{packages}" {python} "$@" | sed 's/"python": "[0-9.]*"/"python": "3.9.1"/'
"""


def test_another_python_version_on_a_host(own_hosts, tmp_path):
    python = Path(sys.executable)
    own_hosts.check(2, ["mount", "-t", "tmpfs", "tmpfs", python.parent])
    for name in ("python", "python3", f"python3.{sys.version_info.minor}"):
        fake = own_hosts.path(2, str(python.parent)) / name
        fake.write_text(ANOTHER.format(packages=sysconfig.get_path("purelib"), python=os.path.realpath(python)))
        fake.chmod(0o755)
    begun = own_hosts.folder / "begun"
    done = own_hosts.ringrun(python, "-H", "h0:1,h1:1,h2:1", python, "-c", f"open('{begun}', 'w')", returncode=3)
    here = "{}.{}.{}".format(*sys.version_info)
    assert re.search(r"^h2 +3\.9\.1\* ", done.stderr, re.MULTILINE), done.stderr
    assert f"h2: Python 3.9.1 there, Python {here} on h0; install the same there" in done.stderr
    assert not begun.exists()
    own_hosts.assert_nothing_is_left()


def test_a_job_is_refused_before_any_rank_starts_unless_the_host_gets_none(python, own_hosts):
    own_hosts.stop_sshd(3)
    begun = own_hosts.folder / "begun"
    done = own_hosts.ringrun(python, "-H", "h0:1,h1:1,h3:1", "touch", begun, returncode=3)
    assert not begun.exists()
    assert "\nh3 *  it refuses the connection (port 22: Connection refused)" in done.stderr
    assert done.stderr.endswith("start sshd there, or name its port with -p PORT\n")
    assert "ringrun: error: h3: it refuses the connection (port 22: Connection refused): no ssh" in done.stderr
    done = own_hosts.ringrun(python, "-np", 2, "-H", "h0:1,h1:1,h3:1", "touch", begun)
    assert (done.returncode, in_table(done.stderr)) == (0, ["h0", "h1"])
    assert begun.exists()
    done = own_hosts.ringrun(python, "-H", "h1,h2", "hostname")  # as many as each of them has cores
    assert (done.returncode, in_table(done.stderr)) == (0, ["h0", "h[1-2]"])
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"h1", "h2"}
    own_hosts.assert_nothing_is_left()


def test_a_slurm_job(python, slurm):
    done = slurm.run(0, ["salloc", "-N2", "-n4", python.parent / "ringrun", "doctor"], timeout=120, returncode=0)
    rows = done.stdout.splitlines()
    assert [row.split()[0] for row in rows[:3]] == ["host", "h0", "h1"]
    assert list(matrix(done.stdout, "Gbit/s")) == ["h0", "h1"]
    slurm.wait_until_gone()


def test_a_slurm_job_with_a_node_that_is_gone(python, own_slurm):
    own_slurm.link_down(1)
    arguments = [python.parent / "ringrun", "doctor", "--start-timeout", "8"]
    done = own_slurm.run(0, ["salloc", "-N2", "-n4", *arguments], timeout=120, returncode=3)
    assert re.search(r"\n  h1: (Slurm did not run a program there|no answer within 8 s)", done.stdout), done.stdout
    own_slurm.wait_until_gone(0)
