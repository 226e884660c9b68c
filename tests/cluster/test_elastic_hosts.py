"""Elastic jobs over several hosts, on both MPIs: a rank, a host, a link is lost, and the others go on."""

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.support.cluster.hosts import PROGRAMS
from tests.support.patience import patient, wait_until

pytestmark = pytest.mark.extended

FLAGS = ["--elastic", "-H", "h0:1,h1:2,h2:1,h3:1", "--lost-after", "4", "--stall-abort-s", "20"]


@pytest.fixture
def train(own_hosts, python):
    """Start a job of five ranks, two of them on h1, one on each other host; return when it trains."""

    def start():
        process = own_hosts.start_ringrun(python, *FLAGS, python, PROGRAMS / "trains.py")

        def trains():
            assert process.poll() is None, process.communicate()
            return (own_hosts.folder / "trains").exists()

        wait_until(trains, within_s=60)
        return process

    return start


def end_of(process):
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    return sorted(out.splitlines()), err


def survivors(*ranks):
    return [f"[{rank}] ended with {len(ranks)} True" for rank in ranks]


def kill(hosts, k, *, only_rank):
    for pid, line in hosts.processes(k).items():
        if ("trains.py" in line and "ringrun" not in line) or not only_rank:
            with contextlib.suppress(ProcessLookupError):  # it has ended with another one
                os.kill(pid, signal.SIGKILL)


def test_a_rank_on_another_host(own_hosts, train):
    job = train()
    kill(own_hosts, 2, only_rank=True)
    lines, err = end_of(job)
    assert lines == survivors(0, 1, 2, 4)
    assert "-- ringrun: rank 3 of 5 failed --" in err
    own_hosts.assert_nothing_is_left()


def test_a_host(own_hosts, train):
    job = train()
    kill(own_hosts, 1, only_rank=False)
    lines, err = end_of(job)
    assert lines == survivors(0, 3, 4), err
    assert all(f"-- ringrun: rank {rank} of 5 failed --" in err for rank in (1, 2))


@pytest.fixture
def system_log():
    """What programs on all hosts, which have one /dev, write to the system's log."""
    path = Path("/dev/log")
    if path.exists():
        pytest.skip("this machine has a system log of its own, which this test would replace")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(path))
        try:
            yield log
        finally:
            path.unlink()


def test_ringrun_itself(own_hosts, train, system_log):
    job = train()
    job.send_signal(signal.SIGKILL)
    job.communicate(timeout=60)
    system_log.settimeout(patient(30))
    told = sorted(system_log.recv(1 << 16).decode().partition("ringrun: ")[2] for _ in range(5))
    why = "the connection to ringrun on host h0 is lost; it ended without a message"
    assert told == [
        f"rank {rank} of 5 on host {host} was ended: {why}" for rank, host in enumerate(["h0", "h1", "h1", "h2", "h3"])
    ]
    own_hosts.assert_nothing_is_left()


def test_no_commits_stay_on_a_host_that_a_restart_leaves_out(own_hosts, python):
    flags = ["--elastic", "--max-failures", 0, "--restarts", 1, "--blacklist-cooldown-range", 100, 100]
    done = own_hosts.ringrun(python, *flags, "-H", "h0:1,h1:1", python, PROGRAMS / "commits.py", returncode=0)
    assert done.stdout == "[0] ended with 1\n", done.stderr
    assert "restarts leave out host h1 for 100 s" in done.stderr
    own_hosts.assert_nothing_is_left()


def test_a_link(own_hosts, train):
    job = train()
    own_hosts.link_down(3)
    lines, err = end_of(job)
    assert lines == survivors(0, 1, 2, 3), err
    assert "its host has not answered for 4 s (--lost-after)" in err
    wait_until(lambda: own_hosts.only_ssh_sessions(3))
