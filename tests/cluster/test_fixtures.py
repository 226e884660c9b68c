"""The hosts and the Slurm of these tests are what they are said to be."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.cluster.hosts import ROOT
from tests.support.patience import wait_until

SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3"]


@pytest.mark.adapters
def test_each_host_is_reached_from_each_by_name_and_address(hosts):
    for k, (name, address) in enumerate(zip(hosts.names, hosts.addresses, strict=True)):
        for target in (name, address):
            assert hosts.run((k + 1) % 4, [*SSH, target, "hostname"]).stdout == f"{name}\n"


def test_host_keys_are_checked(own_hosts):
    own_hosts.new_host_key(2)
    refused = own_hosts.run(0, [*SSH, "h2", "hostname"], returncode=255)
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in refused.stderr
    (own_hosts.home / ".ssh" / "known_hosts").unlink()
    refused = own_hosts.run(0, [*SSH, "h1", "hostname"])
    assert "Host key verification failed" in refused.stderr


def test_a_key_that_nobody_knows_is_refused(own_hosts):
    (own_hosts.home / ".ssh" / "authorized_keys").write_text("")
    assert "Permission denied (publickey" in own_hosts.run(0, [*SSH, "h1", "hostname"]).stderr


def all_of(hosts, k):
    """What host k itself sees of all its processes."""
    return hosts.check(k, ["sh", "-c", "cat /proc/[0-9]*/stat"])


def test_a_host_has_its_own_processes_and_temporary_files(hosts):
    hosts.check(1, ["touch", "/tmp/one", "/dev/shm/two"])
    assert sorted(hosts.left_behind(1)) == ["/dev/shm/two", "/tmp/one"]
    assert hosts.left_behind(0) == []
    assert not Path("/tmp/one").exists()
    sleep = hosts.start(1, ["sleep", "100"])
    while list(hosts.processes(1).values()) != ["sleep 100"]:
        time.sleep(0.01)
    assert hosts.processes(0) == {}
    assert "sleep" not in all_of(hosts, 0)
    sleep.send_signal(signal.SIGINT)
    assert sleep.wait() == -signal.SIGINT
    hosts.wait_until_gone()


def test_orphans_are_collected(hosts):
    hosts.check(3, ["sh", "-c", "setsid sleep 0.1 & true"])
    time.sleep(0.5)
    assert "sleep" not in all_of(hosts, 3), "not even as a zombie"


@pytest.mark.adapters
def test_links_and_daemons_stop_and_start_again(own_hosts):
    own_hosts.link_down(1)
    assert "Connection timed out" in own_hosts.run(0, [*SSH, "h1", "hostname"]).stderr
    own_hosts.link_up(1)
    own_hosts.stop_sshd(2)
    assert "Connection refused" in own_hosts.run(0, [*SSH, "h2", "hostname"]).stderr
    own_hosts.start_sshd(2)
    for name in ("h1", "h2"):
        done = own_hosts.run(0, [*SSH, name, "hostname"])
        assert done.stdout == f"{name}\n", done.stderr


SEND = "import sys; sys.stdout.buffer.write(bytes(2_500_000))"


def test_a_link_has_the_rate_that_it_is_given(own_hosts):
    own_hosts.shape(0, 10)
    begin = time.monotonic()
    own_hosts.check(0, ["bash", "-c", f"{sys.executable} -c '{SEND}' | ssh h1 wc -c"])
    assert time.monotonic() - begin > 1.9, "20 Mbit take two seconds"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_process_that_made_the_hosts(hosts, tmp_path, how):
    program = """
        import sys, time
        from pathlib import Path
        from tests.support.cluster.hosts import Hosts
        with Hosts(2, Path(sys.argv[1])) as hosts:
            hosts.start(1, ["sleep", "1234567"])
            print(*hosts._inits, flush=True)
            time.sleep(100)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), tmp_path / "others"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
        inits = [int(word) for word in other.stdout.readline().split()]
        assert len(inits) == 2
        other.send_signal(how)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inits), within_s=10)
    assert not any(b"1234567" in _command_line(pid) for pid in os.listdir("/proc") if pid.isdecimal())


def _command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_slurm_starts_tasks_on_both_nodes(slurm):
    done = slurm.run(0, ["srun", "-N2", "-n4", "--label", "hostname"])
    assert sorted(done.stdout.splitlines()) == ["0: h0", "1: h0", "2: h1", "3: h1"], done.stderr
    slurm.wait_until_gone()
