"""ringrun stacks: what the ranks of a running job are doing.

    ringrun stacks          lists your running jobs on this host
    ringrun stacks JOB      prints the Python stack of each rank of a job; JOB is the process number of its ringrun

Ranks that are at the same place are shown once. The job goes on: nothing is stopped, also where a rank is stuck in C
code. A rank that does not answer is named, with what the kernel says of it. SIGUSR1 to ringrun prints the same there.
"""

import os
import shlex
import sys
import time
from collections.abc import Sequence

from .errors import LauncherError, UsageError
from .job.control_socket import STACKS, RunningJob, ask, find_jobs
from .processes import state_of
from .text import columns, counted, duration, in_one_line, shortened

_LONGEST_COMMAND = 60


def run(arguments: Sequence[str]) -> int:
    """Do what `ringrun stacks` with `arguments` says and return the exit code; UsageError for no such job."""
    if arguments in (["-h"], ["--help"]):
        print(__doc__.strip() if __doc__ else "")
        return 0
    jobs = find_jobs()
    if not arguments:
        print("\n".join(table(jobs, time.monotonic())))
        return 0
    job = chosen("stacks", arguments, jobs)
    try:
        text = ask(job, STACKS)
    except OSError as error:
        raise unanswered(job, error) from error
    if not text:
        raise LauncherError(f"job {job.pid} ended before its ranks had answered")
    sys.stdout.write(f"{describe(job, time.monotonic())}\n{text}")
    return 0


def table(jobs: Sequence[RunningJob], now_s: float) -> list[str]:
    """Return the lines that list `jobs`."""
    if not jobs:
        return ["no job of yours is running on this host"]
    rows = [("JOB", "RANKS", "SINCE", "COMMAND")]
    for job in jobs:
        age_s = now_s - job.since_s
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - age_s))
        rows.append(
            (
                str(job.pid),
                str(job.size),
                f"{since} ({duration(age_s)})",
                shortened(_command(job), _LONGEST_COMMAND),
            )
        )
    return columns(rows)


def describe(job: RunningJob, now_s: float) -> str:
    """Return the line above a job's stacks."""
    ranks = counted(job.size, "rank")
    return f"job {job.pid}: {_command(job)}; {ranks}, for {duration(now_s - job.since_s)}"


def unanswered(job: RunningJob, error: OSError) -> LauncherError:
    """Return what says that a job does not answer, and why."""
    stopped = f"its ringrun is stopped, as by Ctrl-Z; to continue it: fg, or kill -CONT {job.pid}"
    why = stopped if state_of(job.pid) in "Tt" else "it may have ended"
    return LauncherError(f"job {job.pid} does not answer: {error.strerror or error}; {why}")


def _command(job: RunningJob) -> str:
    return in_one_line(shlex.join(job.command))


def chosen(subcommand: str, arguments: Sequence[str], jobs: Sequence[RunningJob]) -> RunningJob:
    """Return the one of `jobs` that the arguments of this subcommand name; UsageError if it is none of them."""
    if len(arguments) > 1 or arguments[0].startswith("-"):
        raise UsageError(f"ringrun {subcommand} {shlex.join(arguments)}: expected at most one JOB, a process number")
    text = shortened(arguments[0], _LONGEST_COMMAND)
    for job in jobs:
        if text == str(job.pid):
            return job
    running = f"your jobs are: {', '.join(str(job.pid) for job in jobs)}" if jobs else "no job of yours is running here"
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"ringrun {subcommand} {text}: JOB is the process number of a ringrun; {running}")
    what = "is not one of your running ringrun jobs" if os.path.exists(f"/proc/{text}") else "does not exist"
    raise UsageError(f"ringrun {subcommand} {text}: process {text} {what}; {running}")
