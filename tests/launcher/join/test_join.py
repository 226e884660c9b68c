"""ringrun join: which node is which, the key, and nodes that are threads here; real ones are in tests/cluster."""

import contextlib
import os
import queue
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from ringrun import cli
from ringrun.config import resolve as config
from ringrun.connection import wire
from ringrun.connection.link import connect_to, introduce
from ringrun.connection.listener import Listener
from ringrun.errors import MachineError, UsageError
from ringrun.hosts import Found, Host
from ringrun.job.departures import Departures
from ringrun.job.events import HostLeft
from ringrun.join import command
from ringrun.join import node as node_module
from ringrun.join.head import Nodes, OverJoin
from ringrun.join.hub import Hub
from ringrun.join.key import KEY_VARIABLE, read_key
from ringrun.join.node import Lender
from ringrun.join.platforms import PLATFORMS, NodeRank, find_node_rank
from tests.support.documents import having
from tests.support.jobs import ROOT
from tests.support.loops import in_a_loop
from tests.support.patience import wait_until

TOO_LATE = "the job ended before this node joined; see what ringrun has written on the head"
KEY = "0123456789abcdef" * 4
SLURM = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": "123456"}
TRAINER = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": "29400"}
BATCH = {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "1", "AWS_BATCH_JOB_NUM_NODES": "4"}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4", "SKYPILOT_NUM_NODES": "4"}

PLACES = [
    ("torchrun", {"NNODES": "4", "NODE_RANK": "2", "MASTER_ADDR": "h0"}, (2, 4, "h0", 29400)),
    ("torchrun", {"NNODES": "1:4", "NODE_RANK": "2", "MASTER_ADDR": "h0", "MASTER_PORT": "1234"}, (2, 4, "h0", 1234)),
    (
        "Kubeflow's Trainer",
        TRAINER | {"PET_NODE_RANK": "2", "JOB_COMPLETION_INDEX": "2", "PET_MASTER_ADDR": "train-node-0-0.train"},
        (2, 4, "train-node-0-0.train", 29400),
    ),
    ("SkyPilot", SKY | {"SKYPILOT_NODE_RANK": "2"}, (2, 4, "10.0.0.1", 29400)),
    (
        "SageMaker",
        {"SM_HOSTS": '["algo-3","algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-3"},
        (2, 3, "algo-1", 29400),
    ),
    (
        "AWS Batch",
        BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "3", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7"},
        (2, 4, "10.0.0.7", 29400),
    ),
    ("AWS Batch", BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "1"}, (0, 4, "train-2.train.default.svc", 29400)),
    (
        "an Indexed Job of Kubernetes",
        {"JOB_COMPLETION_INDEX": "2", "NNODES": "4"},
        (2, 4, "train-0.train.default.svc", 29400),
    ),
    (
        "an Indexed Job of Kubernetes",
        {"JOB_COMPLETION_INDEX": "1", "NNODES": "4", "MASTER_ADDR": "a-workers-0-0.a", "MASTER_PORT": "3389"},
        (1, 4, "a-workers-0-0.a", 3389),
    ),
    ("a step of Slurm", SLURM | {"SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4, "n1", 23456)),
    (
        "a step of Slurm",
        SLURM | {"SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[3-4]"},
        (0, 2, "n3", 23456),
    ),
]


@in_a_loop(("title", "environ", "place"), PLACES)
def test_a_platform_says_which_node_this_is(title, environ, place):
    found = find_node_rank(environ | {"HOSTNAME": "train-2"}, "train-2.train.default.svc")
    assert (found.index, found.count, found.head, found.port) == place
    assert title in {each for each, variable, _ in PLATFORMS if variable in environ}


def test_every_platform_is_tried():
    assert {title for title, _, _ in PLACES} == {title for title, _, _ in PLATFORMS}
    assert find_node_rank({"MASTER_ADDR": "h0", "SLURM_JOB_ID": "1"}, "h0") is None


@in_a_loop(
    ("environ", "message"),
    [
        ({"NODE_RANK": "1"}, "torchrun was recognized by NODE_RANK, but NNODES is not set; say --nodes N"),
        ({"NODE_RANK": "1", "NNODES": "2"}, "but MASTER_ADDR is not set; set it, or give HEAD:PORT and --nodes N"),
        ({"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": ""}, "but MASTER_ADDR is not set; set it, or give HEAD:PORT"),
        *(
            ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": text}, "but SKYPILOT_NODE_IPS is not set; set it, or")
            for text in ("", "\n")
        ),
        ({"SM_HOSTS": "[" * 100_000, "SM_CURRENT_HOST": "b"}, "SM_CURRENT_HOST=b: expected a list with this host in"),
        (
            {"NODE_RANK": "4", "NNODES": "4", "MASTER_ADDR": "h0"},
            "NNODES=4: this is node 4, but with 4 nodes the last is",
        ),
        ({"NODE_RANK": "x", "NNODES": "4", "MASTER_ADDR": "h0"}, "NODE_RANK='x': expected a whole number from 0 to"),
        (
            {"NODE_RANK": "1", "NNODES": "4", "MASTER_ADDR": "h0", "MASTER_PORT": "0"},
            "MASTER_PORT='0': expected a port from 1 to 65535, got '0'",
        ),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, r"SM_CURRENT_HOST=b: expected a list with this host in it, as"),
        (
            {"JOB_COMPLETION_INDEX": "3", "NNODES": "4"},
            "this pod is called train-2, not NAME-3; set MASTER_ADDR to the name of pod 0",
        ),
        (
            SLURM | {"SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "8"},
            "SLURM_STEP_NUM_TASKS=8: expected one task on each node: srun --ntasks-per-node=1 ringrun join",
        ),
    ],
)
def test_what_a_platform_cannot_have_meant(environ, message):
    with pytest.raises(UsageError, match=message):
        find_node_rank(environ, "train-2.train.default.svc")


def written(path, text, mode):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_key_is_the_same_from_a_file_a_variable_and_standard_input(tmp_path):
    path = written(tmp_path / "key", f"{KEY}\n", 0o600)
    found = read_key(path, {})
    environ = {KEY_VARIABLE: KEY, "A": "b"}
    assert read_key(None, environ) == found
    assert environ == {"A": "b"}
    program = "import sys; from ringrun.join.key import read_key; print(read_key('-', {}).hex(), sys.stdin.read())"
    done = subprocess.run([sys.executable, "-c", program], input=f"{KEY}\nthe rest", capture_output=True, text=True)
    assert done.stdout == f"{found.hex()} the rest\n", done.stderr
    assert read_key(written(tmp_path / "another", KEY[1:] + "1", 0o400), {}) != found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o660])
def test_a_key_that_belongs_to_another_user_is_none(mode, tmp_path):
    path = written(tmp_path / "key", KEY, mode)
    os.chown(path, 1234, -1)
    with pytest.raises(UsageError, match="it belongs to user 1234, who can read it; make a copy that is yours: "):
        read_key(path, {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root's")
def test_a_key_of_root_s_is_taken_by_its_group(tmp_path, monkeypatch):
    """As a Secret of Kubernetes, whose group is the pod's."""
    path = written(tmp_path / "key", KEY, 0o640)
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert read_key(path, {}) == read_key(None, {KEY_VARIABLE: KEY})


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (KEY, 0o640, r"--key-file \S+: others can read it \(mode 0640\); make it yours alone: chmod 600 /"),
        ("secret\n", 0o600, "expected a key of at least 32 characters, got 6; make one for all nodes, as with: "),
        (None, 0, "--key-file .*: No such file or directory; make one for all nodes"),
    ],
)
def test_a_key_that_others_may_know_is_none(text, mode, message, tmp_path):
    path = str(tmp_path / "key") if text is None else written(tmp_path / "key", text, mode)
    with pytest.raises(UsageError, match=message):
        read_key(path, {})


def test_a_head_can_be_joined_from_its_own_host_by_any_of_its_names(tmp_path, monkeypatch):
    """Other hosts are not told of these addresses: there they are their own."""
    monkeypatch.setattr(command, "own_addresses", lambda hosts, interfaces: ("127.0.0.2",))
    with socket.socket() as free:
        free.bind(("", 0))
        place = NodeRank(0, 0, "localhost", free.getsockname()[1], "")
    with contextlib.closing(command._listener(str(tmp_path), place, b"k" * 32)) as listener:
        assert listener.address.addresses == ("127.0.0.2",)
        for address in ("127.0.0.1", "127.0.1.1", "127.0.0.2"):
            socket.create_connection((address, place.port), 30).close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["true"], "nothing says which node this is; expected NODE_RANK, NNODES and MASTER_ADDR, or"),
        (["--nodes", "2", "h0:1234", "true"], "h0:1234: HEAD:PORT must come before all flags: ringrun join"),
        (
            ["localhost:1234", "--nodes", "2", "true"],
            r"localhost means another host on each of 2 nodes \(localhost:1234\)",
        ),
        (["h0:1234", "true"], r"the number of nodes is unknown; add --nodes N, or -np N to wait for N slots"),
        (["h0:1234", "--lend", "0", "--key-file", "KEY"], "--lend: expected a whole number from 1 to 999999, got '0'"),
        (["h0:1234", "--lend", "two", "--key-file", "KEY"], "--lend: expected a whole number from 1 to"),
        (["h0:1234", "--nodes", "2", "true"], "a job's nodes need a key: --key-file FILE, or the variable RINGRUN_KEY"),
        (["h0:99999", "--nodes", "2", "true"], "h0:99999: expected a port from 1 to 65535, got '99999'"),
        (
            ["h0:1234", "--nodes", "2", "--key-file", "KEY", "-H", "h1", "true"],
            "-H: the hosts of this job are the nodes",
        ),
        (
            ["h0:1234", "--nodes", "2", "--key-file", "KEY", "--host-discovery-script", "hosts.sh", "true"],
            "--host-discovery-script: the hosts of this job are the nodes that join; leave it out",
        ),
        (["h0:1234", "--nodes", "2", "--key-file", "KEY"], "no command to run"),
    ],
)
def test_wrong_command_lines(arguments, message, tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    key = written(tmp_path / "key", KEY, 0o600)
    with pytest.raises(UsageError, match=message):
        command.run([key if each == "KEY" else each for each in arguments])


@pytest.mark.parametrize(
    ("flags", "have_joined", "starts"),
    [
        (["-np=4"], 4, ("4", None)),
        (["-np=4"], 3, None),
        (["-np=4", "--elastic"], 3, ("3", "4")),
        (["-np=4", "--elastic", "--max-np=6"], 2, ("2", "6")),
        (["-np=4", "--elastic", "--min-np=2", "--spares=1"], 3, ("2", "4")),
        (["-np=4", "--elastic", "--min-np=2", "--spares=1"], 2, None),
    ],
)
def test_an_elastic_head_starts_with_the_slots_that_have_joined_if_they_are_enough(
    flags, have_joined, starts, tmp_path, monkeypatch
):
    class Nodes:
        departures = None

        def __init__(self, *_):
            pass

        def await_all(self, count, timeout_s, what):
            assert what == "slots"
            return have_joined

        def found(self, *, with_slots):
            return Found([Host("n1", have_joined)], "they have joined", in_slurm=False)

        def release(self, code, late):
            released.append(code)

    started, released = [], []
    monkeypatch.setattr(command, "Nodes", Nodes)
    monkeypatch.setattr(command, "_listener", lambda *_: None)
    monkeypatch.setattr(command, "leave_batch_system", lambda *_: None)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(
        command.cli, "run_job", lambda request: started.append((request.options.np, request.options.max_np)) or 0
    )
    key = written(tmp_path / "key", KEY, 0o600)
    code = command.run(["localhost:1234", "--lend=0", *flags, "--key-file", key, "true"])
    assert started == ([starts] if starts else [])
    assert released == [code] == [0 if starts else 3]


@pytest.fixture
def nodes(tmp_path):
    """nodes(count): a hub here, and so many nodes that are threads; returns what reaches them, and their names."""
    own = wire.Node(0, "n0", 1)
    authkey = bytes(range(32))
    listener = Listener(str(tmp_path), ["127.0.0.1"], 4096, authkey=authkey)
    ringrun, lifeline = socket.socketpair()
    departures, departed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hub = Hub(listener, str(tmp_path), own, departed)
    serving = threading.Thread(target=hub.serve, args=(lifeline,))
    codes, begun = {}, []

    def start(count):
        hub.start()
        serving.start()
        for number in range(1, count):
            add(number, f"n{number}")
        return asker

    def speak(*node):
        """A node that says who it is, and does nothing."""
        link = at_end.enter_context(contextlib.closing(connect_to("127.0.0.1", listener.address.port, authkey, 30.0)))
        link.send(wire.Node(*node))
        return link

    def add(number, host):
        place = NodeRank(number, 4, "127.0.0.1", listener.address.port)

        def be():
            codes[number] = Lender(place, authkey, 30.0).run(wire.Node(number, host, 2), 60.0)

        begun.append(number)
        threading.Thread(target=be, daemon=True).start()

    asker = object.__new__(Nodes)
    asker._lifeline, asker._lines, asker._lock = ringrun, ringrun.makefile("r"), threading.Lock()
    start.speak, start.codes, start.port, start.release = speak, codes, listener.address.port, asker.release
    start.hub = hub
    start.key, start.departures = authkey, departures
    with contextlib.ExitStack() as at_end:
        yield start
    if serving.ident:
        asker.release(0)
        serving.join(30)
        wait_until(lambda: len(codes) == len(begun))
    asker._lines.close()
    for each in (ringrun, departures, departed):
        each.close()


def ran(tmp_path, names, *argv):
    """What each of the nodes has answered."""
    answers = OverJoin(str(tmp_path), 60.0).remote(str(tmp_path)).run(names, argv)
    return {
        name: answer.stdout.decode() if answer.problem is None else answer.problem for name, answer in answers.items()
    }


@pytest.mark.parametrize("count", [3, pytest.param(64, marks=pytest.mark.adapters)])
def test_a_command_runs_on_every_node(count, nodes, tmp_path):
    """64 nodes: all are asked at the same time."""
    asker = nodes(count)
    assert asker.await_all(count, 60.0) == count
    assert [node.host for node in asker.there()[0]] == [f"n{number}" for number in range(count)]
    assert asker.there()[1] == "127.0.0.1"
    names = [f"n{number}" for number in range(1, count)]
    assert ran(tmp_path, names, "/bin/echo", "a b", "$HOME") == dict.fromkeys(names, "a b $HOME\n")
    nodes.release(7)
    wait_until(lambda: nodes.codes == dict.fromkeys(range(1, count), 7))


@pytest.mark.parametrize("shell", ["/usr/sbin/nologin", "/bin/false", "", "/no/such/shell", "/bin/echo"])
def test_an_account_that_may_not_log_in_runs_commands_too(shell, nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(node_module.pwd, "getpwuid", lambda _: SimpleNamespace(pw_shell=shell))
    assert nodes(2).await_all(2, 60.0) == 2
    assert ran(tmp_path, ["n1"], "/bin/echo", "a b", "$HOME") == {"n1": "a b $HOME\n"}


def test_the_shell_of_an_account_that_may_log_in_is_its_own(monkeypatch):
    """Of csh an MPI's launcher writes another command than of sh."""
    shell = next(each for each in Path("/etc/shells").read_text().split() if "bash" in each)
    monkeypatch.setattr(node_module.pwd, "getpwuid", lambda _: SimpleNamespace(pw_shell=shell))
    assert node_module._shell() == shell


def test_a_command_that_cannot_be_started_says_so(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(node_module, "_shell", lambda: "/no/such/shell")
    assert nodes(2).await_all(2, 60.0) == 2
    why = f"{socket.gethostname()} cannot run it: [Errno 2] No such file or directory: '/no/such/shell'"
    assert ran(tmp_path, ["n1"], "/bin/true")["n1"].what == f"it did not run the command: {why}"


@pytest.mark.parametrize("thread", ["_start", "_pump"])
def test_a_node_that_can_start_no_thread_says_so_and_stays(thread, nodes, tmp_path, monkeypatch):
    assert nodes(2).await_all(2, 60.0) == 2
    start = threading.Thread.start

    def refuse(each):
        if each._target and each._target.__module__ == node_module.__name__ and each._target.__name__ == thread:
            raise RuntimeError("can't start new thread")
        start(each)

    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", refuse)
        problem = ran(tmp_path, ["n1"], "/bin/true")["n1"]
    assert "cannot run it: can't start new thread" in problem.what
    assert ran(tmp_path, ["n1"], "/bin/echo", "again") == {"n1": "again\n"}


def test_the_head_stays_until_its_nodes_have_gone(nodes):
    asker = nodes(1)
    link = nodes.speak(1, "n1", 1)
    assert asker.await_all(2, 60.0) == 2
    releasing = threading.Thread(target=nodes.release, args=(7,))
    releasing.start()
    assert link.receive() == wire.Release(7, "")
    releasing.join(0.2)
    assert releasing.is_alive()
    link.close()
    releasing.join(30)
    assert not releasing.is_alive()


def test_a_node_that_is_not_taken_yet_when_the_job_ends_goes_with_its_code(nodes, monkeypatch):
    """It believes that it has joined once it has sent its name."""
    asker, at_the_door, may_come_in = nodes(1), threading.Event(), threading.Event()
    admit = Hub.admit

    def late(self, *arguments):
        at_the_door.set()
        assert may_come_in.wait(30)
        return admit(self, *arguments)

    monkeypatch.setattr(Hub, "admit", late)
    link = nodes.speak(1, "n1", 1)
    assert at_the_door.wait(30)
    releasing = threading.Thread(target=asker.release, args=(7,))
    releasing.start()
    releasing.join(0.2)
    may_come_in.set()
    assert link.receive() == wire.Release(7, TOO_LATE)
    link.close()
    releasing.join(30)


def test_input_output_and_exit_codes_are_the_command_s_own(nodes, tmp_path):
    nodes(2).await_all(2, 60.0)
    argv = OverJoin(str(tmp_path), 60.0).rsh(str(tmp_path))
    ran(tmp_path, ["n1"], "/bin/true")  # writes the file that argv names
    text = os.urandom(1 << 20)
    done = subprocess.run([*argv, "n1", "cat;", "echo error >&2; exit 3"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout == text, done.stderr) == (3, True, b"error\n")
    assert subprocess.run([*argv, "n1", "kill -9 $$"], timeout=60).returncode == 128 + 9
    pid = tmp_path / "pid"
    left = subprocess.Popen([*argv, "n1", f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 300"])
    wait_until(pid.exists)
    left.kill()
    left.wait()
    wait_until(lambda: not Path("/proc", pid.read_text().strip()).exists())


def test_a_node_that_has_gone(nodes, tmp_path):
    asker = nodes(1)
    assert "host n9 has left the job" in ran(tmp_path, ["n9"], "/bin/true")["n9"].what
    link = nodes.speak(5, "n5", 2)
    assert asker.await_all(2, 60.0) == 2
    found = {}
    call = threading.Thread(target=lambda: found.update(ran(tmp_path, ["n5"], "/bin/true")))
    call.start()
    assert isinstance(link.receive(), wire.Run)
    link.close()
    call.join(60)
    assert "its connection was lost" in found["n5"].what
    wait_until(lambda: len(asker.there()[0]) == 1)
    events = queue.SimpleQueue()
    heard = Departures(nodes.departures, events)  # of an attempt that begins after that
    heard.start()
    links = [nodes.speak(number, f"n{number}", 1) for number in (7, 8)]
    assert asker.await_all(3, 60.0) == 3
    links[1].close()
    assert events.get(timeout=30) == HostLeft("n8")
    heard.close()
    assert events.empty()


def test_a_node_that_comes_after_the_job_has_failed_is_told(nodes):
    asker = nodes(1)
    assert asker.await_all(1, 60.0) == 1
    releasing = threading.Thread(target=nodes.release, args=(3, 3))
    releasing.start()
    wait_until(lambda: not asker._lines.closed and nodes.hub._release)
    for number in (1, 2):  # one after the other: until all have come
        assert releasing.is_alive()
        link = nodes.speak(number, f"n{number}", 1)
        assert link.receive() == wire.Release(3, TOO_LATE)
        link.close()
    releasing.join(30)
    assert not releasing.is_alive()


def lent(number, host, slots, machine="a boot", gpus=""):
    return number, host, slots, machine, gpus


def hosts_of(asker):
    return [
        (host.name, host.slots, [slots for _, slots in host.lenders]) for host in asker.found(with_slots=True).hosts
    ]


def test_when_it_is_told_that_a_host_has_left_ringrun_finds_no_rest_of_it(nodes):
    asker, found = nodes(1), []

    class Departures:
        def send(self, *_):
            found.append(hosts_of(asker))

    nodes.hub._departures = Departures()
    link = nodes.speak(*lent(-1, "n1", 2))
    assert asker.await_all(3, 60.0, "slots") == 3
    link.close()
    wait_until(lambda: found)
    assert found == [[("n0", 1, [])]]


def test_parts_of_one_host_that_are_lent_are_one_host_whose_first_lender_runs_what_is_run(nodes, tmp_path):
    asker = nodes(1)
    links = []
    for slots, gpus in ((2, "4,5"), (1, ""), (3, "7,5")):
        links.append(nodes.speak(*lent(-1, "n1", slots, gpus=gpus)))
        wait_until(lambda: len(asker._ask()[0][-1][1]) == len(links))
    assert asker.await_all(7, 60.0, "slots") == 7
    assert hosts_of(asker) == [("n0", 1, []), ("n1", 6, [2, 1, 3])]
    found = {}
    call = threading.Thread(target=lambda: found.update(ran(tmp_path, ["n1"], "/bin/true")))
    call.start()
    assert links[0].receive().gpus == "4,5,7", "those of all, each once"
    events = queue.SimpleQueue()
    heard = Departures(nodes.departures, events)
    heard.start()
    numbers = [number for number, _ in asker.found(with_slots=True).hosts[1].lenders]
    links[1].close()
    assert events.get(timeout=30) == HostLeft("n1", numbers[1]), "a part"
    assert hosts_of(asker) == [("n0", 1, []), ("n1", 5, [2, 3])]
    assert call.is_alive()
    links[0].close()
    assert events.get(timeout=30) == HostLeft("n1"), "with what ran there, all that is on the host"
    call.join(60)
    assert "its connection was lost" in found["n1"].what
    assert hosts_of(asker) == [("n0", 1, []), ("n1", 3, [3])]
    links[2].close()
    assert events.get(timeout=30) == HostLeft("n1", numbers[2])
    assert hosts_of(asker) == [("n0", 1, [])]
    heard.close()


def test_what_is_lent_of_the_head_s_own_host_is_a_host_of_another_name(nodes):
    asker = nodes(1)
    assert nodes.speak(*lent(-1, "n0", 2)).receive().why.startswith("a node called n0 has already joined; give each")
    nodes.hub._own = nodes.hub._own._replace(slots=0)  # a head without ranks
    nodes.hub._hosts = {"n0": (nodes.hub._hosts["n0"][0]._replace(node=nodes.hub._own),)}
    nodes.speak(*lent(-1, "n0", 2))
    assert asker.await_all(2, 60.0, "slots") == 2
    assert hosts_of(asker) == [("n0-lent", 2, [2])], "and the head gets no ranks"


@pytest.mark.parametrize("node", [lent(-1, "n1", 1, "another boot"), (-1, "n1", 1), (2, "n1", 1), lent(-1, "n0", 1)])
def test_a_part_of_another_machine_or_a_whole_node_does_not_become_part_of_a_host(node, nodes):
    asker = nodes(1)
    nodes.speak(*lent(-1, "n1", 2))
    assert asker.await_all(3, 60.0, "slots") == 3
    why = f"a node called {node[1]} has already joined; give each host a name of its own"
    assert nodes.speak(*node).receive() == wire.Release(2, why)
    assert hosts_of(asker) == [("n0", 1, []), ("n1", 2, [2])]


def test_what_a_lender_says_of_itself(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    whole, part = (node_module.own_node(-1, 2, lends_part=each) for each in (False, True))
    assert whole == wire.Node(-1, socket.gethostname(), 2)
    assert part == node_module.own_node(-1, 2, lends_part=True)
    assert part._replace(machine="") == whole._replace(gpus="3,4")
    assert len(part.machine.split()) == 5


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ((0, "other", 1), "node 0 has already joined, as host n0"),
        ((0, "n0", 1), "a node called n0 has already joined; give each host a name of its own"),
        ((2, "n1", 1), "a node called n1 has already joined; give each host a name of its own"),
        ((3, "localhost", 1), "its host name is localhost; give it one of its own"),
    ],
)
def test_a_node_that_cannot_be_told_from_another_is_refused(node, why, nodes):
    asker = nodes(2)
    assert asker.await_all(2, 60.0) == 2
    assert nodes.speak(*node).receive() == wire.Release(2, why)
    assert len(asker.there()[0]) == 2


def test_a_node_that_comes_again_takes_its_place(nodes, tmp_path):
    asker = nodes(2)
    asker.await_all(2, 60.0)
    nodes.speak(1, "n1", 5)
    wait_until(lambda: [node.slots for node in asker.there()[0]] == [1, 5])


def test_nodes_that_nobody_has_numbered_come_last_by_their_names(nodes):
    asker = nodes(2)
    for name in ("b", "a"):
        nodes.speak(-1, name, 1)
    assert asker.await_all(4, 60.0) == 4
    assert [node.host for node in asker.there()[0]] == ["n0", "n1", "a", "b"]


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def test_strangers_get_nothing(nodes, monkeypatch):
    asker = nodes(2)
    assert asker.await_all(2, 60.0) == 2
    clock = Clock()
    monkeypatch.setattr("ringrun.join.node.time", clock)
    stranger = Lender(NodeRank(2, 4, "127.0.0.1", nodes.port), b"another key", 30.0)
    with pytest.raises(
        MachineError, match=r"127.0.0.1 port \d+: what listens there does not know this job's key; give"
    ):
        stranger.run(wire.Node(2, "n2", 1), 600.0)
    assert 5.0 < clock.now_s < 6.0, "the last job's head may still listen there; 600 s are for one that comes later"
    sent = replayed(nodes)
    with socket.create_connection(("127.0.0.1", nodes.port)) as again:
        again.sendall(sent)
        assert len(answer(again)) == 32, "a nonce, and no proof"
    assert [node.host for node in asker.there()[0]] == ["n0", "n1"]


def replayed(nodes):
    """All that a node with the key sends, as somebody on the way has seen it."""
    ours, theirs = socket.socketpair()
    sent = b""
    with socket.create_connection(("127.0.0.1", nodes.port)) as hub, ours, theirs:
        theirs.settimeout(30)
        node = threading.Thread(target=introduced, args=(ours, nodes.key))
        node.start()
        for count, source, sink in ((32, theirs, hub), (32, hub, theirs), (32, theirs, hub), (32, hub, theirs)):
            data = source.recv(count, socket.MSG_WAITALL)
            sink.sendall(data)
            sent += data if source is theirs else b""
        node.join(30)
    assert len(sent) == 64
    return sent


def introduced(sock, key):
    with contextlib.suppress(OSError):
        introduce(sock, key, 30.0).close()


def answer(sock):
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 10):
            data += piece
    return data


@pytest.mark.parametrize(("head", "why"), [("127.0.0.1", "Connection refused"), ("n0.invalid", "Name or service.*")])
def test_nobody_listens(head, why, monkeypatch, capsys):
    for name in ("_PROGRESS_S", "_PAUSE_S"):
        monkeypatch.setattr(f"ringrun.join.node.{name}", 0.0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        lender = Lender(NodeRank(1, 2, head, probe.getsockname()[1], "NODE_RANK=1"), b"key", 30.0)
        with pytest.raises(
            MachineError, match=rf"port \d+: no head has answered for 0\.9 s \(.*{why}\); see that the h"
        ):
            lender.run(wire.Node(1, "n1", 1), 0.9)
    said = rf"ringrun: {head} port \d+: no head has answered yet \({why}\); trying for another 1 s\n"
    assert re.match(said, err := capsys.readouterr().err)
    assert err.count("\n") < 30, "each after twice the time"


def test_a_head_whose_name_is_none_is_not_waited_for():
    lender = Lender(NodeRank(1, 2, "job-0..ns.svc", 29400, "NODE_RANK=1, NNODES=2"), b"key", 30.0)
    why = r"that is no host's name \(.*label.*\); is a variable in it not set\? \(NODE_RANK=1, NNODES=2\)"
    with pytest.raises(UsageError, match=rf"job-0\.\.ns\.svc port 29400: {why}"):
        lender.run(wire.Node(1, "n1", 1), 600.0)


def test_its_manual_has_ringrun_s_flags_too(ringrun):
    done = ringrun("join", "--help", returncode=0)
    for part in ("ringrun join [HEAD:PORT]", "--key-file FILE", "--elastic", "RINGRUN_KEY", "Environment of a rank"):
        assert part in done.stdout
    assert cli.parse(["--", "join"]).job.command == ["join"]


FILES = [path.name for path in sorted((ROOT / "examples" / "join").iterdir())]
"""aws-batch.json, indexed-job.yaml, jobset.yaml, sagemaker.sh, skypilot.yaml, slurm.sbatch, trainjob.yaml"""


@in_a_loop("name", FILES)
def test_an_example_s_command_can_be_run(name):
    """Its flags and its script exist, its nodes have a key, and pods of Kubernetes know how many they are."""
    text = (ROOT / "examples" / "join" / name).read_text()
    words = re.findall(r"ringrun[\", ]+join[\", ]+(.*?)[\]\n]", text)[-1]
    options = config.resolve(command._parser(), re.findall(r"[^\", ]+", words), {}).options
    python, script, flag = options.command
    assert (python, flag) == ("python", "--synthetic")
    assert (ROOT / "examples" / script.removeprefix("examples/")).is_file()
    mounted = "mountPath: /etc/ringrun\n" in text and "secretName: ringrun\n" in text
    assert options.key_file == ("/etc/ringrun/key" if mounted else None)
    assert mounted or "RINGRUN_KEY" in text
    for document in yaml.safe_load_all(text) if name.endswith(("yaml", "json")) else ():
        for spec in having("completions", document):
            assert spec["completions"] == spec["parallelism"] == int(options.nodes)
