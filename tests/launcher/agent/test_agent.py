"""An agent in this process, and what it says when its rank ends; what whole jobs show is in the neighbours."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import syslog
import threading
import time
from pathlib import Path

import pytest

from ringrun.agent import agent as agent_module
from ringrun.agent import kept_commits, shm_cleanup
from ringrun.agent.agent import Agent
from ringrun.connection import wire
from ringrun.connection.link import HostSilentError
from ringrun.environment import RankInfo, Settings
from ringrun.machine.placement import Share
from ringrun.machine.topology import Gpu, Topology
from tests.support import jobs
from tests.support.patience import patient

HEAD = wire.Address("head", "/nowhere")


class SlowLink:
    """A connection that takes output only once the death of the rank is known."""

    is_local = True

    def __init__(self):
        self.sent = []
        self._died = threading.Event()

    def send(self, message):
        if isinstance(message, wire.Output):
            assert self._died.wait(patient(5)), "the death is not reported"
        self.sent.append(message)
        if isinstance(message, wire.Died):
            self._died.set()
        if isinstance(message, wire.Ended):
            raise SystemExit  # else the agent waits for what children of its rank may write


class ScriptedLink:
    """A connection to a ringrun that sends these messages, or is gone."""

    is_local, lost_after_s = True, 4.0

    def __init__(self, *messages):
        self._messages = iter(messages)
        self.sent = []

    def receive(self):
        if isinstance(message := next(self._messages), Exception):
            raise message
        return message

    def send(self, message):
        assert not isinstance(message, wire.Started)
        self.sent.append(message)


def test_an_agent_removes_the_folder_of_commits_that_ringrun_has_named_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module.os, "_exit", sys.exit)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent_module.processes, "show_as", lambda argv: shown.append(argv[-2:]))
    shown = []
    users, ours = str(tmp_path), kept_commits.new_name()
    for number, commits in enumerate(("", users, f"{ours}/../{Path(ours).name}", ours)):
        Path(str(number)).mkdir()
        assert kept_commits.prepared(ours)
        setup = wire.Setup(
            ("/no/such/command", "--of", ":"),
            "",
            0,
            users,
            {"RINGREDUCE_STATE_DIR": users},
            gives_stdin=False,
            commits=commits,
        )
        agent = Agent(
            ScriptedLink(setup, wire.End()), RankInfo(0, 1, 0, 1), Settings(HEAD, "openmpi", str(number)), daemon=0
        )
        with pytest.raises(SystemExit):
            agent.run()
        agent._rank_socket._socket.close()
        assert Path(users).exists()
        assert Path(ours).exists() == (commits != ours)
    assert shown == [["--of", ":"]] * 4


def test_an_agent_that_is_cut_off_leaves_the_commits_to_the_others_of_its_host():
    """The last one removes them: where ringrun is gone nobody else does."""
    folder = kept_commits.new_name()
    leaves = "kept_commits.prepared(sys.argv[1]); kept_commits.remove_if_last(sys.argv[1])"
    command = [sys.executable, "-c", f"import sys; from ringrun.agent import kept_commits; {leaves}", folder]
    assert kept_commits.prepared(folder)
    jobs.run(command)
    assert Path(folder).exists()
    kept_commits.remove_if_last(folder)
    assert not Path(folder).exists()


def test_commits_that_a_killed_ringrun_has_left_are_swept_away():
    """At once on its own host, after an hour on others, where nobody holds a lock in the pause before a restart."""
    here, there, long_ago, locked = (kept_commits.new_name() for _ in range(4))
    code = "import sys; from ringrun.agent import kept_commits; print(all(map(kept_commits.prepared, sys.argv[1:])))"
    made = [here, there, long_ago]
    assert jobs.run([sys.executable, "-c", code, *made]).stdout == "True\n"
    assert kept_commits.prepared(locked)
    try:
        for folder in (here, locked):
            kept_commits.keep(folder, is_locked=True)
        for folder in (there, long_ago):
            kept_commits.keep(folder, is_locked=False)
        an_hour_ago_s = time.time() - 3601
        os.utime(long_ago, (an_hour_ago_s, an_hour_ago_s))
        kept_commits.sweep()
        assert [Path(each).exists() for each in (here, there, long_ago, locked)] == [False, True, False, True]
    finally:
        for folder in (there, locked):
            kept_commits.remove(folder)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o710])
def test_a_folder_for_commits_that_others_may_enter_is_not_used(mode):
    folder = kept_commits.new_name()
    Path(folder).mkdir(0o700)
    try:
        assert kept_commits.prepared(folder) == folder
        Path(folder).chmod(mode)
        assert kept_commits.prepared(folder) == ""
    finally:
        kept_commits.remove(folder)


def ends_its_rank(link, folder, monkeypatch, commits=""):
    """Let the agent of rank 1 of 3 do what this ringrun says, and return how its rank has ended."""
    monkeypatch.setattr(agent_module.os, "_exit", sys.exit)
    monkeypatch.setattr(
        agent_module.processes, "kill_descendants", lambda: None
    )  # those of this process are other tests'
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as child:
        agent = Agent(link, RankInfo(1, 3, 0, 1), Settings(HEAD, "openmpi", str(folder)), daemon=child.pid)
        agent._commits_folder = commits
        with pytest.raises(SystemExit):
            agent._await_end(child.pid)
        agent._rank_socket._socket.close()
        return child.wait(patient(5))


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (EOFError(), "it ended without a message"),
        (HostSilentError(), "its host has not answered for 4 s (--lost-after)"),
        (ValueError("message 3 was changed"), "message 3 was changed"),
    ],
)
def test_an_agent_that_loses_ringrun_ends_its_rank_and_the_systems_log_says_why(error, why, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(syslog, "syslog", lambda priority, text: logged.append((priority, text)))
    link = ScriptedLink(error)
    link.is_local = False
    assert ends_its_rank(link, tmp_path, monkeypatch) == -signal.SIGKILL
    host = socket.gethostname()
    told = f"rank 1 of 3 on host {host} was ended: the connection to ringrun on host head is lost; {why}"
    assert logged == [(syslog.LOG_ERR, told)]
    note = wire.Note(f"ringrun: rank 1 of 3 on host {host} was ended: {why}")
    assert link.sent == ([note] if isinstance(error, ValueError) else [])


@pytest.mark.parametrize("is_there", [True, False])
def test_an_agent_that_loses_ringrun_keeps_the_folder_of_other_ranks_while_ringrun_is_there(
    is_there, tmp_path, monkeypatch
):
    monkeypatch.setattr(syslog, "syslog", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("folder/socket")
        if is_there:
            listening.listen()
        ends_its_rank(ScriptedLink(EOFError()), Path("folder"), monkeypatch)
    assert Path("folder").exists() == is_there


@pytest.mark.parametrize("broken", ["look", "in_session"])
def test_an_agent_that_fails_ends_its_rank_and_one_that_cannot_look_at_it_goes_on(broken, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, "no descriptor")

    monkeypatch.setattr(shm_cleanup.ShmCleanup if broken == "look" else shm_cleanup, broken, fail)
    link = ScriptedLink(wire.Signal(signal.SIGTERM), wire.End())
    code = -signal.SIGKILL if broken == "look" else -signal.SIGTERM
    assert ends_its_rank(link, tmp_path, monkeypatch) == code
    failed = (
        f"rank 1 of 3 on host {socket.gethostname()} was ended because its agent failed: OSError(24, 'no descriptor')"
    )
    assert link.sent == [wire.Note(f"ringrun: {failed}")] * (broken == "look")


def test_a_death_that_is_heard_in_two_ways_is_reported_once(tmp_path, monkeypatch):
    dies = threading.Event()
    monkeypatch.setattr(agent_module, "await_death", lambda files, pid: dies.wait(patient(5)) and 7)
    link = SlowLink()
    agent = Agent(link, RankInfo(0, 1, 0, 1), Settings(HEAD, "openmpi", str(tmp_path)), daemon=0)
    lives = [sys.executable, "-c", "import os, sys; sys.stdin.readline(); os._exit(7)"]
    child = subprocess.Popen(lives, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    agent._on_init(child.pid, [])
    dies.set()
    assert link._died.wait(patient(5))
    assert child.poll() is None, "reported before its end"
    child.stdin.close()
    with child, pytest.raises(SystemExit):
        agent._forward(child, agent._watch(child.pid))
    agent._rank_socket._socket.close()
    died, ended = link.sent
    assert isinstance(died, wire.Died)
    assert isinstance(ended, wire.Ended)
    assert ended.at_s == died.at_s


@pytest.mark.parametrize("has_others", [False, True])
def test_an_agent_that_alone_loses_ringrun_leaves_its_host_s_commits_to_the_others(has_others, tmp_path, monkeypatch):
    monkeypatch.setattr(syslog, "syslog", lambda *_: None)
    folder = kept_commits.prepared(kept_commits.new_name())
    with contextlib.ExitStack() as others:
        if has_others:
            descriptor = os.open(folder, os.O_RDONLY)
            others.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        ends_its_rank(ScriptedLink(EOFError()), tmp_path, monkeypatch, folder)
        assert Path(folder).exists() == has_others
    kept_commits.remove(folder)


def test_what_ends_a_process_that_a_rank_has_started_is_not_the_rank_s_end(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module.Agent, "_end_late", lambda *_: None)
    agent = Agent(ScriptedLink(), RankInfo(0, 1, 0, 1), Settings(HEAD, "openmpi", str(tmp_path)), daemon=0)
    agent._rank_socket._socket.close()
    agent._on_exit(10, 11, 3)
    assert agent._exit is None
    agent._on_exit(10, 10, 4)
    agent._on_exit(10, 10, 5)
    assert agent._exit[0] == 4


def test_an_agent_that_can_start_no_thread_answers_and_goes_on(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    link = SlowLink()
    agent = Agent(link, RankInfo(0, 1, 0, 1), Settings(HEAD, "openmpi", str(tmp_path)), daemon=0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    agent._handle(wire.Ask(7), 1)
    agent._on_init(1, [])
    agent._rank_socket._socket.close()
    assert link.sent == [wire.Answer(7, "", "", "its agent cannot ask it: can't start new thread")]


def test_output_that_ringrun_does_not_take_waits_in_the_rank_until_its_end(tmp_path):
    link = SlowLink()
    link._died.set()
    agent = Agent(link, RankInfo(0, 1, 0, 1), Settings(HEAD, "openmpi", str(tmp_path)), daemon=0)
    chatters = [sys.executable, "-c", f"import os; os.write(1, bytes({9 * wire.MOST_AHEAD_BYTES}))"]
    child = subprocess.Popen(chatters, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def sent():
        return sum(len(each.data) for each in link.sent if isinstance(each, wire.Output))

    def end_it():
        while sent() < wire.MOST_AHEAD_BYTES:
            pass
        child.kill()

    ending = threading.Thread(target=end_it)
    ending.start()
    in_pipe = fcntl.fcntl(child.stdout, fcntl.F_GETPIPE_SZ)
    with child, pytest.raises(SystemExit):
        agent._forward(child, agent._watch(child.pid))
    ending.join()
    agent._rank_socket._socket.close()
    assert wire.MOST_AHEAD_BYTES < sent() <= wire.MOST_AHEAD_BYTES + agent_module._CHUNK_BYTES + in_pipe


def test_a_death_is_reported_before_what_the_rank_wrote_is_read(tmp_path):
    link = SlowLink()
    agent = Agent(link, RankInfo(0, 1, 0, 1), Settings(HEAD, "openmpi", str(tmp_path)), daemon=0)
    last_words = [sys.executable, "-c", "import os; os.write(1, b'last words'); os._exit(7)"]
    child = subprocess.Popen(last_words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with child, pytest.raises(SystemExit):
        agent._forward(child, agent._watch(child.pid))
    agent._rank_socket._socket.close()
    died, said, ended = link.sent
    assert isinstance(died, wire.Died)
    assert died.code == 7
    assert said == wire.Output("stdout", b"last words")
    assert isinstance(ended, wire.Ended)
    assert ended.code == 7


@pytest.mark.parametrize("bind", [True, False])
@pytest.mark.parametrize(
    ("rank", "local_rank", "ranks", "idle"), [(0, 0, 1, 7), (4, 0, 4, 4), (5, 1, 4, 0), (0, 0, 8, 0)]
)
def test_gpus_without_a_rank_are_named_once_on_each_host(rank, local_rank, ranks, idle, bind, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_module, "place", lambda topology, size: [Share(())] * size)
    link, settings = ScriptedLink(), Settings(HEAD, "openmpi", str(tmp_path), bind=bind, verbose=True)
    agent = Agent(link, RankInfo(rank, 8, local_rank, ranks), settings, daemon=0)
    agent._share(Topology((), tuple(Gpu(str(index)) for index in range(8))))
    agent._rank_socket._socket.close()
    text = f"; {idle} of 8 GPUs idle: to run a rank on each, raise -np, or Slurm's --ntasks-per-node"
    assert [text in sent.text for sent in link.sent] == [idle > 0] * (local_rank == 0 and (idle > 0 or bind))
