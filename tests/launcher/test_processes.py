"""What a child does before it becomes the user's command; whose session it is of."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from ringrun.processes import (
    before_exec,
    bind_to,
    how_ended,
    in_session,
    start_with_parent,
    state_of,
    why_not_started,
)
from tests.support import jobs
from tests.support.loops import in_a_loop

ASK = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]


def test_a_child_is_bound_to_what_it_is_given():
    one = min(os.sched_getaffinity(0))
    done = subprocess.run(ASK, preexec_fn=before_exec(None, bind_to({one})), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"[{one}]\n", "")


def test_a_child_that_cannot_be_bound_says_so_and_runs():
    absent = (os.cpu_count() or 1) + 8000
    done = subprocess.run(ASK, preexec_fn=before_exec(bind_to({absent})), capture_output=True, text=True)
    assert done.stdout == f"{sorted(os.sched_getaffinity(0))}\n"
    assert done.stderr == f"ringrun: not bound to CPUs {absent}: Invalid argument\n"


SIGNALS = """
import ctypes, sys
dies_by = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(dies_by))
masks = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Sig"))
bits = {name: [n + 1 for n in range(31) if int(masks[name], 16) >> n & 1] for name in ("SigIgn", "SigBlk")}
print(dies_by.value, bits, sys.argv[1:])
"""


@pytest.fixture(params=[1, 2], ids=["alone", "beside a thread"])
def _threads(request, monkeypatch):
    """A fork may run Python where no other thread may hold a lock; elsewhere there is a helper."""
    monkeypatch.setattr(threading, "active_count", lambda: request.param)


@pytest.mark.usefixtures("_threads")
def test_a_child_ends_with_its_parent_ignores_what_it_should_and_hears_ctrl_c():
    ignored = [signal.SIGUSR1, signal.SIGUSR2]
    argv = [sys.executable, "-I", "-S", "-c", SIGNALS, "a b", "", "caf\udce9"]
    plain = subprocess.run(argv, capture_output=True, text=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with start_with_parent(argv, signal.SIGTERM, ignored, stdout=subprocess.PIPE, text=True) as child:
            out, _ = child.communicate()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert plain.stdout.startswith("0 ")
    both = sorted([*ignored, signal.SIGPIPE, signal.SIGXFSZ])  # the last two: Python's own
    assert out == f"15 {{'SigIgn': {[int(each) for each in both]}, 'SigBlk': []}} ['a b', '', 'caf\\udce9']\n"


@pytest.mark.usefixtures("_threads")
def test_a_child_whose_parent_died_before_it_could_ask_for_a_signal_ends(monkeypatch):
    own = os.getpid
    numbers = iter([own() + 1])  # as if the parent had been another, which is gone
    monkeypatch.setattr(os, "getpid", lambda: next(numbers, None) or own())
    with start_with_parent(["true"], signal.SIGTERM) as child:
        assert child.wait() == -signal.SIGKILL


@pytest.mark.usefixtures("_threads")
def test_a_child_that_cannot_be_executed_is_told_at_once(monkeypatch):
    with pytest.raises(FileNotFoundError, match="no/such/program"):
        start_with_parent(["/no/such/program"], signal.SIGTERM)
    with pytest.raises(PermissionError, match=__file__):
        start_with_parent([__file__], signal.SIGTERM)
    monkeypatch.chdir(os.path.dirname(__file__))
    with pytest.raises(FileNotFoundError, match="test_processes"):
        start_with_parent([os.path.basename(__file__)], signal.SIGTERM)
    with pytest.raises(FileNotFoundError, match="'sh'"):
        start_with_parent(["sh"], signal.SIGTERM, env={"PATH": "/nowhere"})


@pytest.mark.usefixtures("_threads")
def test_a_child_whose_program_does_not_ignore_sigpipe_does_not():
    show = ["sh", "-c", "grep SigIgn /proc/self/status"]
    expected = subprocess.run(show, stdout=subprocess.PIPE).stdout
    with start_with_parent(show, signal.SIGTERM, stdout=subprocess.PIPE) as child:
        assert child.stdout.read() == expected


@in_a_loop(
    ("code", "how"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-33, "was killed by signal 33"),
        (-(signal.SIGRTMIN + 1), f"was killed by signal {signal.SIGRTMIN + 1}"),  # valid, and without a name
    ],
)
def test_how_a_process_has_ended(code, how):
    assert how_ended(code) == how


THREADS_LIVE_ON = """
import ctypes, os, subprocess, sys, threading, time
def live_on():
    os.waitpid(subprocess.Popen(["sh", "-c", "setsid sleep 78 & setsid sleep 78; true"]).pid, 0)
threading.Thread(target=live_on).start()
print("up", flush=True)
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit, of this thread
"""


def test_all_that_a_process_has_started_is_killed_also_where_its_main_thread_has_ended():
    """Until its other threads have, nobody adopts its children; and helpers leave its group and its session."""
    program = f"""
import subprocess, sys, time
from ringrun import processes
processes.adopt_orphans()
child = subprocess.Popen([sys.executable, "-c", {THREADS_LIVE_ON!r}], stdout=subprocess.PIPE)
child.stdout.readline()
while processes.state_of(child.pid) != "Z" or len(processes._descendants()) < 4:
    time.sleep(0.01)
print(*processes._descendants(), flush=True)
processes.kill_descendants()
print(processes.state_of(child.pid))
"""
    done = jobs.run([sys.executable, "-c", program], timeout_s=60, returncode=0)
    found, state = done.stdout.splitlines()
    assert state == "X"
    assert {pid: state_of(int(pid)) for pid in found.split()} == dict.fromkeys(found.split(), "X")


SHOWN = """
import subprocess, sys
from ringrun.processes import show_as
show_as(sys.argv[1:])
print(open("/proc/self/cmdline", "rb").read())
print(subprocess.run(["sh", "-c", "cat /proc/$PPID/cmdline; cat /proc/$$/cmdline"], stdout=subprocess.PIPE).stdout)
"""


def test_a_process_is_shown_as_what_it_runs_and_its_children_as_themselves():
    words = ["python", "-m", "ringrun.agent", "train.py", "--sep", ":", "", "a b", "caf\udce9", "x" * 70000]
    shown = b"".join(os.fsencode(word) + b"\0" for word in words)
    done = jobs.run([sys.executable, "-c", SHOWN, *words], timeout_s=60, returncode=0)
    child = b"sh\0-c\0cat /proc/$PPID/cmdline; cat /proc/$$/cmdline\0"
    assert done.stdout.splitlines() == [repr(shown), repr(shown + child)]


def test_the_processes_of_a_session_are_found_and_no_others():
    of_its_own_group = "subprocess.Popen(['sleep', '77'], preexec_fn=os.setpgrp)"
    program = f"import os, subprocess, time; print({of_its_own_group}.pid, flush=True); time.sleep(77)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:
        try:
            inner = int(leader.stdout.readline())
            assert os.getpgid(inner) != leader.pid
            assert {leader.pid, inner} <= set(in_session(leader.pid))
            assert os.getpid() not in in_session(leader.pid)
        finally:
            for pid in in_session(leader.pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("name", "interpreter"), [("./train.sh", "sh"), ("./train.py", "python"), ("train", "python")])
def test_a_script_without_an_interpreter_is_told_with_the_one_of_its_name(name, interpreter):
    error = OSError(errno.ENOEXEC, os.strerror(errno.ENOEXEC), name)
    assert why_not_started(error, name).endswith(f"; or start it with ringrun … {interpreter} {name}")
