"""A rank's agent hears of its death, and how it dies, when that begins."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from ringrun.agent.death_notice import await_death
from tests.support.patience import patient

RANK = """
    import ctypes, os, signal, sys, threading
    import numpy as np
    from ringreduce.runtime.recovery import death_notice
    {give}
    kept = np.ones({megabytes} << 17)
    print("given", flush=True)
    sys.stdin.readline()
    {end}
"""
GIVE = "death_notice.give(sys.argv[1])"


@contextmanager
def rank(files, end, give=GIVE, megabytes=1):
    """A process that gives notice; it ends when it can read a line."""
    code = "\n".join(line.strip() for line in RANK.format(give=give, end=end, megabytes=megabytes).splitlines())
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code, files], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as child:
        assert child.stdout.readline() == "given\n"
        try:
            yield child
        finally:
            child.kill()


def let_go(child):
    child.stdin.write("\n")
    child.stdin.flush()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("ctypes.string_at(0)", -signal.SIGSEGV),
        ("os._exit(7)", 7),
        ("sys.exit(8)", 8),
        ("raise ValueError", 1),
        ("threading.Thread(target=os._exit, args=(9,)).start(); signal.pause()", 9),
        ("pass", 0),
    ],
)
def test_every_death_is_heard_with_its_exit_code(tmp_path, end, code):
    heard = []
    with rank(tmp_path / "3", end) as child:
        waits = threading.Thread(target=lambda: heard.append(await_death(tmp_path / "3", child.pid)), daemon=True)
        waits.start()
        assert not heard
        let_go(child)
        waits.join(patient(30))
        assert heard == [code]
        assert child.wait(patient(30)) == code


def test_it_is_heard_before_the_memory_is_released(tmp_path):
    def is_first(name):
        order = []
        with rank(tmp_path / name, "signal.pause()", megabytes=500) as child:

            def hear():
                assert await_death(tmp_path / name, child.pid) == -signal.SIGKILL
                order.append("heard")

            waits = threading.Thread(target=hear, daemon=True)
            waits.start()
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            order.append("ended")
            waits.join(patient(30))
        return order == ["heard", "ended"]

    assert any(is_first(f"{k}") for k in range(10)), "at least when this machine has the time for both"


@pytest.mark.parametrize(
    ("give", "end"),
    [
        ("", "pass"),
        ("one = threading.Thread(target=death_notice.give, args=(sys.argv[1],)); one.start(); one.join()", "pass"),
        (GIVE, "os.execlp('sleep', 'sleep', '100')"),
    ],
    ids=["no notice", "of a thread", "another program"],
)
def test_what_is_no_death_is_not_taken_for_one(tmp_path, give, end):
    with rank(tmp_path / "3", end, give) as child:
        let_go(child)
        assert await_death(tmp_path / "3", child.pid) is None
