"""Whether a process that a rank has started may have joined other ranks: by what it has loaded, and is connected to."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from ringrun.agent.agent import Agent
from ringrun.agent.join_watch import JoinWatch
from ringrun.connection.wire import Alone, Grouped, InInit, Initialized
from ringrun.environment import RankInfo, Settings
from tests.launcher.agent.test_agent import HEAD, ScriptedLink

FIRST = """
import mmap, os, socket, sys
own, child, connected = sys.argv[1:]
def load(path):
    if path:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write("library")
        return mmap.mmap(os.open(path, os.O_RDWR), 0)
listening = socket.create_server(("127.0.0.1", 0))
kept = [load(own), connected == "both" and socket.create_connection(listening.getsockname())]
if not os.fork():
    kept += [load(child), connected == "child" and socket.create_connection(listening.getsockname())]
    print("ready", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def rank(own, child, connected):
    command = [sys.executable, "-c", FIRST, own, child, connected]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, start_new_session=True, text=True, **pipes) as first:
        try:
            assert first.stdout.readline() == "ready\n"
            yield first.pid
        finally:
            os.killpg(first.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("own", "child", "connected", "found"),
    [
        ("", "lib/libmpi.so.40", "", True),
        ("", "lib/libmpich.so.12", "", True),
        ("lib/libmpi.so", "", "", False),  # Lightning's, and a data loader's fork
        ("", "site/jaxlib/libjax_common.so", "child", True),
        ("", "site/tensorflow/libtensorflow_cc.so", "child", True),
        ("", "site/jaxlib/libjax_common.so", "", False),
        ("", "site/jaxlib/libjax_common.so", "both", False),
        ("", "site/torch/lib/libtorch.so", "child", False),
        ("", "", "child", False),
    ],
)
def test_which_children_may_have_joined_others(own, child, connected, found, tmp_path):
    watch = JoinWatch()
    with rank(*(str(tmp_path / each) if each else "" for each in (own, child)), connected) as first:
        watch.look(first)
    assert watch.may_have_joined == found


def test_an_agent_passes_on_that_its_rank_is_alone_unless_a_child_is_not(tmp_path):
    link, alone = ScriptedLink(), Alone("torch", ends=True, in_vain=False)
    agent = Agent(link, RankInfo(0, 2, 0, 1), Settings(HEAD, "openmpi", str(tmp_path)), daemon=0)
    agent._pass_on(alone)
    agent._join_watch.may_have_joined = True
    agent._pass_on(alone)
    agent._pass_on(in_vain := alone._replace(in_vain=True))
    assert link.sent == [alone, in_vain]
    for report in (InInit(1.0), Initialized(), Grouped(0, 2)):
        agent._join_watch.is_known = False
        agent._pass_on(report)
        assert agent._join_watch.is_known
    agent._rank_socket._socket.close()
