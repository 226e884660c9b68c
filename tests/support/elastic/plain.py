"""Jobs that are not elastic, one rank of which fails at a random moment (storm.py --plain).

Run as a program, this is one rank: python -m tests.support.elastic.plain 'RANK SECONDS HOW'
"""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

ANYWHERE = {"SIGKILL": 137, "SIGSEGV": 139, "abort": 134, "_exit7": 7}
"""How a rank ends, from any thread, with which exit code of ringrun's."""
AT_A_STEP = {"raise": 1, "exit3": 3, "exit_text": 1}
STALLS = {"SIGSTOP": 1, "sleep": 1}  # the others give up, and say whom they waited for
CODES = {**ANYWHERE, **AT_A_STEP, **STALLS}


class Job(NamedTuple):
    """What a seed has drawn."""

    size: int
    rank: int
    at_s: float
    how: str
    has_children: bool

    def __str__(self) -> str:
        """One line."""
        return f"{self.size} ranks, {self.rank} {self.at_s} {self.how}{' with children' * self.has_children}"


def draw(seed: int, spares: int = 0) -> Job:
    """One rank of two to four fails, often while all start."""
    dice = random.Random(seed)
    size, how = dice.randint(2, 4), dice.choice([*ANYWHERE, *AT_A_STEP] * 3 + [*STALLS])
    at_s = round(dice.choice([0.3, 1.0, 2.0]) * dice.random() + 3.0 * (how in STALLS), 3)
    return Job(size, dice.randrange(size), at_s, how, dice.random() < 0.3)


def run(job: Job, python: Path = Path(sys.executable)):
    """Run a job, and look at how it has ended, and at what it has left."""
    from tests.support import jobs
    from tests.support.elastic import isolated, storm

    plan = f"{job.rank} {job.at_s} {job.how} {int(job.has_children)}"
    command = [jobs.ringrun(python), "-np", job.size, python, "-m", "tests.support.elastic.plain", plan]
    ended = isolated.run(command, RINGREDUCE_STALL_ABORT_S="4", RINGREDUCE_STALL_CHECK_S="2")
    return storm.outcome(ended, CODES[job.how], faults(job, ended.printed), [job.rank])


def faults(job: Job, printed: str) -> list[str]:
    """What is wrong with a job's report."""
    named = re.findall(r"-- ringrun: rank (\d+) of \d+ failed first --", printed)
    is_blamed = re.search(rf"missing: rank {job.rank}\b|rank {job.rank}, the coordinator, does not answer", printed)
    is_wrong = not is_blamed if job.how in STALLS else named != [str(job.rank)]
    return [f"rank {job.rank} failed, and {named} are named"] * is_wrong


def die(how: str) -> None:
    """End this process, or this thread's waiting, or let it hang."""
    if how.startswith("SIG"):
        # to this thread: where another one gets SIGSTOP, this one goes on until that one has a core
        signal.pthread_kill(threading.get_ident(), getattr(signal, how))
    elif how.startswith("_exit"):
        os._exit(int(how.removeprefix("_exit")))
    elif how.startswith("exit"):
        sys.exit("on purpose" if how == "exit_text" else int(how.removeprefix("exit")))
    elif how == "raise":
        raise ValueError("on purpose")
    elif how == "abort":
        os.abort()
    else:
        assert how == "sleep"
        time.sleep(1000)


def main() -> None:
    """One rank."""
    import ringreduce as rr

    rank, at_s, how, has_children = sys.argv[1].split()
    is_mine, began_s = os.environ["RANK"] == rank, time.monotonic()
    if has_children == "1":
        for of_its_own in (os.setpgrp, os.setsid):
            subprocess.Popen(["sleep", "1000"], preexec_fn=of_its_own)
    if is_mine and how in ANYWHERE:
        threading.Timer(float(at_s), die, [how]).start()
    rr.init()
    while True:
        rr.allreduce(np.ones(1000), name="gradient")
        if is_mine and how not in ANYWHERE and time.monotonic() > began_s + float(at_s):
            die(how)


if __name__ == "__main__":
    main()
