"""What a child does before it becomes the user's command."""

import os
import subprocess
import sys

from ringrun.processes import before_exec, bind_to

ASK = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]


def test_a_child_is_bound_to_what_it_is_given() -> None:
    one = min(os.sched_getaffinity(0))
    done = subprocess.run(ASK, preexec_fn=before_exec(None, bind_to({one})), capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"[{one}]\n", "")


def test_a_child_that_cannot_be_bound_says_so_and_runs() -> None:
    absent = (os.cpu_count() or 1) + 8000
    done = subprocess.run(ASK, preexec_fn=before_exec(bind_to({absent})), capture_output=True, text=True)
    assert done.stdout == f"{sorted(os.sched_getaffinity(0))}\n"
    assert done.stderr == f"ringrun: not bound to CPUs {absent}: Invalid argument\n"
