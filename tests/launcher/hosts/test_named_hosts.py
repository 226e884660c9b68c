"""Hosts that are named, of which only this one gets ranks."""

import os
import queue
import signal
import socket
import threading

import pytest

from ringrun import cli
from ringrun.doctor import command as doctor
from ringrun.errors import UsageError
from ringrun.hosts import Found, Host, hostfile, is_here, may_get_ranks, place_ranks
from ringrun.hosts.host import parse_host_list
from ringrun.job.growth import Blacklist, Growth, HostWatch
from ringrun.processes import state_of
from tests.support.jobs import executable
from tests.support.loops import in_a_loop
from tests.support.patience import patient, wait_until

IP_FREEBIND = 15


@pytest.mark.parametrize(
    ("ours", "names"),
    [
        (True, ["localhost", "127.0.0.1", "::1", "gpu7", "gpu7.lab", "GPU7.Lab", "127.0.0.2", "0:0:0:0:0:0:0:1"]),
        (True, ["LOCALHOST", "Localhost", "localhost.localdomain", "ip6-localhost", "localhost4", "localhost6"]),
        (True, ["localhost.", "gpu7.lab.", "gpu7."]),
        (False, ["gpu8", "gpu70", "gpu", "192.0.2.1", "2001:db8::1", "gpu7.other", "gpu7.other."]),
    ],
)
def test_names_of_this_host_and_of_others(ours, names):
    assert [is_here(Host(name, 4), "gpu7.lab") for name in names] == [ours] * len(names)


@pytest.mark.parametrize("name", ["192.0.2.7", "2001:db8::7"])
def test_an_address_of_another_host_is_not_ours_where_a_socket_can_be_bound_to_it(name, monkeypatch):
    """As with net.ipv4.ip_nonlocal_bind=1."""
    bind = socket.socket.bind

    def anywhere(sock, address):
        sock.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        bind(sock, address)

    monkeypatch.setattr(socket.socket, "bind", anywhere)
    assert not is_here(Host(name))
    assert is_here(Host("127.0.0.2"))


def test_domains_tell_hosts_of_one_name_apart(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda name: f"{name}.rack1")
    assert is_here(Host("n1.rack1"), "n1")
    assert not is_here(Host("n1.rack2"), "n1")
    monkeypatch.setattr(socket, "getfqdn", lambda name: name)
    assert is_here(Host("n1.rack2"), "n1"), "no domain is known"
    monkeypatch.setattr(socket, "getfqdn", lambda name: "localhost.localdomain")
    assert not is_here(Host("n2"), "n1")


def _placed(*arguments):
    options = cli.parse([*arguments, "true"])
    size, hosts = place_ranks(options.found, options.np)
    return size, [(host.name, count) for host, count in hosts]


def test_slots_say_how_many_ranks_there_are(tmp_path, monkeypatch):
    assert _placed("-H", "localhost:3") == (3, [])
    assert _placed("-np", "2", "-H", "localhost:3") == (2, [])
    (tmp_path / "hosts").write_text(f"# ours\n\n{socket.gethostname()} slots=5\n")
    assert _placed("--hostfile", str(tmp_path / "hosts")) == (5, [])
    assert _placed("-np", "4", "-H", "localhost:3,elsewhere.example:2") == (
        4,
        [("localhost", 3), ("elsewhere.example", 1)],
    )
    assert _placed("-np", "3", "-H", "localhost:3,elsewhere.example:2") == (3, []), "the other gets none"
    monkeypatch.setenv("SLURM_JOB_NODELIST", socket.gethostname())
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "7")
    assert _placed() == (7, [])
    assert _placed("-H", "localhost:2") == (2, [])


@in_a_loop(
    ("hosts", "size", "names"),
    [
        ("localhost:2,h9:2", 4, ["localhost", "h9"]),
        ("localhost:2,h9:2", 2, []),
        ("h8:2,localhost:2", 3, ["h8", "localhost"]),
        ("localhost,h9:2", 1, ["localhost", "h9"]),
        ("h9:2,localhost", None, ["h9", "localhost"]),
        ("localhost,127.0.0.1:2", 3, []),
    ],
)
def test_which_hosts_may_get_ranks_if_any_other_than_this_one(hosts, size, names):
    """Those without slots may get any: how many is known when they have been asked."""
    found = Found(parse_host_list(hosts), "-H", in_slurm=False)
    assert [host.name for host in may_get_ranks(found, size)] == names


def test_a_slurm_job_starts_its_own_nodes_and_ssh_the_others(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x3)")
    assert _placed() == (6, [("n1", 2), ("n2", 2), ("n3", 2)])
    for arguments, in_slurm in (([], True), (["-H", "n2:1,n3:1"], True), (["-H", "n2:1,m1:1"], False)):
        assert cli.parse([*arguments, "true"]).found.in_slurm is in_slurm
    monkeypatch.setenv("SLURM_JOB_NODELIST", "None assigned")
    with pytest.raises(UsageError, match="'None assigned'; to name the hosts yourself: -H or --hostfile"):
        _placed()
    assert cli.parse(["-H", "n2:1", "true"]).found.in_slurm is False, "as it says"


@in_a_loop("hosts", [2, 64, 512])
@in_a_loop(("asked", "seconds"), [([], None), (["--start-timeout", "7"], 7.0)])
def test_more_hosts_may_take_longer_to_start_unless_it_is_said(hosts, asked, seconds):
    seconds = seconds or 30 + 0.2 * hosts
    named = ["-H", ",".join(f"n{number}:8" for number in range(hosts))]
    request = cli.parse([*named, *asked, "true"])
    assert (request.job.start_timeout_s, request.job.reach.timeout_s) == (seconds, seconds / 2)
    links = doctor.parse([*named, *asked])
    assert (links.reach.timeout_s, links.flags[:2]) == (seconds, ["--start-timeout", f"{seconds:g}"])


@pytest.mark.parametrize(("asked", "seconds"), [([], 30.0), (["--lost-after", "90"], 90.0)])
def test_how_long_a_host_may_be_silent_is_one_setting(asked, seconds):
    named = ["-H", "n1:1,n2:1"]
    request, links = cli.parse([*named, *asked, "true"]), doctor.parse([*named, *asked])
    assert {request.job.lost_after_s, request.job.reach.options.lost_after_s, links.reach.options.lost_after_s} == {
        seconds
    }
    assert links.flags[2:4] == ["--lost-after", f"{seconds:g}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-np", "4", "-H", "localhost:3"], "-np 4: the hosts have only 3 slots (localhost:3)"),
        (["-H", "localhost", "--hostfile", "f"], "-H and --hostfile cannot be combined"),
        (["--hostfile", "no-such-file"], "no-such-file"),
        (["-H", "localhost:none"], "localhost:none"),
        (["-p", "ssh"], "--ssh-port: expected a port from 1 to 65535, got 'ssh'"),
        (["-p", "65536"], "--ssh-port: expected a port from 1 to 65535, got '65536'"),
        (["-i", "no-such-key"], "--ssh-identity-file no-such-key: no such file"),
        (["--network-interfaces", "lo,eth77"], "there is no interface 'eth77' here; there are lo"),
        (["--start-timeout", "0"], "--start-timeout: expected a number of seconds above 0, got '0'"),
        (["--lost-after", "never"], "--lost-after: expected a number of seconds above 0, got 'never'"),
        (["--env", "RINGRUN_AUTHKEY"], "--env RINGRUN_AUTHKEY: ringrun sets this variable itself"),
        (["--env", "RINGREDUCE_SPARES=1"], "--env RINGREDUCE_SPARES: ringrun sets this variable itself"),
        (["--env", "=B"], "--env '': expected NAME or NAME=VALUE"),
        (["--env", "NOT_SET_ANYWHERE"], "--env NOT_SET_ANYWHERE: there is no such variable here"),
        (["--launcher", "ssh"], "--launcher: expected mpirun or srun, got 'ssh'"),
        (["-np", "2", "--stdin", "0,1"], "expected one rank"),
        (["-np", "2", "--stdin", "2"], "--stdin: there is no rank 2"),
        (["doctor", "train.py"], "unexpected argument 'train.py'; see ringrun doctor --help"),
        (["doctor", "-H", "h1", "--hostfile", "f"], "-H and --hostfile cannot be combined"),
        (["doctor", "--hostfile", "no-such-file"], "hostfile no-such-file: no such file"),
        (["doctor", "-p", "none"], "--ssh-port: expected a port from 1 to 65535, got 'none'"),
        (["doctor", "-i", "no-such-key"], "--ssh-identity-file no-such-key: no such file"),
        (["doctor", "--start-timeout", "nan"], "--start-timeout: expected a number of seconds above 0, got 'nan'"),
        (["doctor", "--network-interfaces", "none0"], "--network-interfaces none0: there is no interface 'none0' here"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(ringrun, arguments, message):
    done = ringrun(*arguments, *["true"] * (arguments[0] != "doctor"))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


def test_ranks_start_in_the_slots(ringrun):
    done = ringrun("-H", "localhost:3", "sh", "-c", "echo $RANK of $WORLD_SIZE", returncode=0)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {rank} of 3" for rank in range(3)]


def test_ringrun_is_not_started_once_for_every_rank(ringrun):
    done = ringrun("true", env={"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, returncode=2)
    assert "srun has started ringrun 4 times (SLURM_STEP_NUM_TASKS=4)" in done.stderr
    assert "salloc also gives you a shell, as `srun --pty bash` does\n" in done.stderr
    assert ringrun("-np", 1, "true", env={"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}).returncode == 0


# a program that prints the hosts


def test_a_program_says_which_hosts_there_are(tmp_path):
    script = executable(tmp_path / "discover", "#!/bin/sh\necho h1:$1\necho '# gone: h9'\necho h2:2\n")
    request = cli.parse(["--host-discovery-script", f"{script} 3", "true"])
    assert request.found
    assert request.found.hosts == [Host("h1", 3), Host("h2", 2)]
    script.write_text("#!/bin/sh\necho h1:$1\n")
    found = request.find_hosts()
    assert found
    assert found.hosts == [Host("h1", 3)], "it is asked again at each restart"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("exit 3", "it ended with exit code 3; it wrote: (nothing)"),
        ("echo no network >&2; exit 1", "it ended with exit code 1; it wrote: no network"),
        ("kill -9 $$", "it was killed by SIGKILL; it wrote: (nothing)"),
        ("echo", "it printed no host; expected a line for each, as in 'h1:4'"),
        ("echo h1:x", "its output:1: 'h1:x': slots: expected a whole number from 1 to 999999, got 'x'"),
    ],
)
def test_a_program_that_finds_no_hosts_is_quoted(source, why, tmp_path):
    script = executable(tmp_path / "discover", f"#!/bin/sh\n{source}\n")
    with pytest.raises(UsageError) as error:
        cli.parse(["--host-discovery-script", str(script), "true"])
    assert str(error.value) == f"--host-discovery-script {script}: {why}"


@pytest.mark.parametrize(
    ("text", "named", "why"),
    [
        ("#!/nowhere/sh -u\n", "./discover", "its first line, '#!/nowhere/sh -u', names an interpreter that does not"),
        ("#!/bin/sh\r\n", "./discover", r"it has Windows line endings, so the system looks for '/bin/sh\r'; to change"),
        ("#!/bin/sh\n", "discover", "to run the file here: ./discover"),
    ],
)
def test_why_a_program_that_is_there_cannot_be_executed(text, named, why, tmp_path, monkeypatch):
    executable(tmp_path / "discover", text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with pytest.raises(UsageError) as error:
        cli.parse(["--host-discovery-script", named, "true"])
    where = f"--host-discovery-script {named}: cannot be executed: No such file or directory ({named})"
    assert str(error.value).startswith(where)
    assert str(error.value)[len(where) :].lstrip(":; ").startswith(why)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_without_a_first_line_for_the_kernel_is_a_shells(threads, tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: threads)
    script = executable(tmp_path / "discover", "for host in h1:3 h2:2; do echo $host; done\necho $1\n")
    assert hostfile.discover([str(script), "h3:1"]) == [Host("h1", 3), Host("h2", 2), Host("h3", 1)]
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert hostfile.discover(["discover", "h4:4"]) == [Host("h1", 3), Host("h2", 2), Host("h4", 4)]


def test_a_program_that_takes_too_long_is_ended_with_what_it_has_started(tmp_path, monkeypatch):
    """Which else would hold its stdout, for whose end nobody waits."""
    monkeypatch.setattr(hostfile, "_TIMEOUT_S", 0.5)
    script = executable(tmp_path / "discover", f"#!/bin/sh\nsh -c 'echo $$ > {tmp_path}/pid; exec sleep 1000'\n")
    with pytest.raises(UsageError, match=r"it did not end within 0\.5 s"):
        cli.parse(["--host-discovery-script", str(script), "true"])
    wait_until(lambda: is_gone(tmp_path / "pid"))


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_a_program_that_prints_without_end_is_ended_before_it_fills_the_memory(stream, tmp_path):
    script = executable(tmp_path / "discover", f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec yes h1:1{stream}\n")
    with pytest.raises(UsageError, match=r"discover: it printed more than 16 MiB; expected a line for each host"):
        cli.parse(["--host-discovery-script", str(script), "true"])
    wait_until(lambda: is_gone(tmp_path / "pid"))


def test_a_program_is_not_waited_for_by_what_it_leaves_behind(tmp_path):
    """Which holds its stdout and stderr, as the master of an ssh with ControlPersist."""
    script = executable(tmp_path / "discover", "#!/bin/sh\nsleep 1000 &\necho $! > $1\necho h1:2\necho said >&2\n")
    try:
        assert hostfile.discover([str(script), str(tmp_path / "pid")]) == [Host("h1", 2)]
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_program_does_not_outlive_who_looks_for_hosts(tmp_path):
    script = executable(tmp_path / "discover", f"#!/bin/sh\nsh -c 'echo $$ > {tmp_path}/pid; exec sleep 1000'\n")
    said, events = [], queue.SimpleQueue()
    growth = Growth(lambda: hostfile.discover([str(script)]), tuple, Blacklist(None), 9)
    watch = HostWatch(growth, lambda _: None, lambda: None, events, said.append)
    watch.start()
    wait_until((tmp_path / "pid").exists)
    wait_until((tmp_path / "pid").read_text)
    watch.close()
    wait_until(lambda: is_gone(tmp_path / "pid"))
    watch._thread.join(patient(10))
    assert not watch._thread.is_alive()
    assert said == []


@pytest.mark.without_mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_a_program_does_not_outlive_a_ringrun_that_is_ended_before_the_job(number, start, tmp_path):
    script = executable(tmp_path / "discover", "#!/bin/sh\nsh -c 'echo $$ > pid; exec sleep 1000'\n")
    process = start("--host-discovery-script", str(script), "true")
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    process.send_signal(number)
    assert process.communicate(timeout=patient(20)) == ("", "")
    assert process.returncode == 128 + number
    wait_until(lambda: is_gone(tmp_path / "pid"))


def test_a_program_that_starts_when_nobody_looks_any_more_is_ended_too(tmp_path, monkeypatch):
    script, closing = executable(tmp_path / "discover", "#!/bin/sh\nexec sleep 1000\n"), threading.Event()

    def named():
        assert closing.wait(patient(10))
        return hostfile.discover([str(script)])

    def stop():
        hostfile.stop_discovery()
        closing.set()

    monkeypatch.setattr("ringrun.job.growth.stop_discovery", stop)
    monkeypatch.setattr("ringrun.job.growth._LEAVE_S", patient(10))
    growth = Growth(named, tuple, Blacklist(None), 9)
    watch = HostWatch(growth, lambda _: None, lambda: None, queue.SimpleQueue(), print)
    watch.start()
    watch.close()
    assert not watch._thread.is_alive()


def is_gone(file):
    return state_of(int(file.read_text())) in "ZX"


def test_odd_bytes_in_what_a_program_says_are_no_fault(tmp_path):
    script = executable(tmp_path / "discover", "#!/bin/sh\nprintf 'h1:2\\n# in the caf\\351\\n'\n")
    assert hostfile.discover([str(script)]) == [Host("h1", 2)]


def test_one_source_of_hosts_is_enough(tmp_path):
    with pytest.raises(
        UsageError, match="--host-discovery-script cannot be combined with -H or --hostfile; use only one"
    ):
        cli.parse(["--host-discovery-script", "x", "-H", "h1", "true"])
    missing = tmp_path / "missing"
    with pytest.raises(UsageError, match=f"--host-discovery-script {missing}: cannot be executed: No such file"):
        cli.parse(["--host-discovery-script", str(missing), "true"])
