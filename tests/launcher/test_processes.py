"""What a child does before it becomes the user's command; whose session it is of."""

import os
import signal
import subprocess
import sys

from ringrun.processes import before_exec, bind_to, in_session

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
