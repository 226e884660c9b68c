"""ringrun top: what a running job does, each second: how long a step takes, and who waits for whom.

    ringrun top             watches your job on this host; lists them if there are several
    ringrun top JOB         watches this one; JOB is the process number of its ringrun
    ringrun top --once      prints the table once, as where stdout is no terminal, or TERM is dumb

A row is a rank: its step, and milliseconds of a step, over the last ten seconds: computing, waiting for ranks that have
not submitted yet, and exposed to communication. A rank marked with > is late: others wait for it. With more ranks than
lines those that are waited for the longest are shown. The job's ranks record their steps as long as this runs, or from
the start with --report. Ctrl-C leaves; the job continues.
"""

import json
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence

from .errors import LauncherError
from .job.control_socket import TOTALS, RunningJob, ask, find_jobs
from .output.display import is_terminal
from .run_report import Totals, row, table
from .stacks import chosen, describe, unanswered
from .stacks import table as jobs_table
from .text import shortened

_EVERY_S = 1.0
_KEPT = 10  # answers: speeds are those of so many seconds
_ONCE_S = 10.0
"""How long --once waits for two messages of each rank, with a step between."""

_HOME, _TO_END_OF_LINE, _TO_END = "\x1b[H", "\x1b[K\n", "\x1b[J"

History = dict[int, deque[Totals]]


def run(arguments: Sequence[str]) -> int:
    """Do what `ringrun top` with `arguments` says and return the exit code; UsageError for no such job."""
    if arguments in (["-h"], ["--help"]):
        print(__doc__.strip() if __doc__ else "")
        return 0
    names = [argument for argument in arguments if argument != "--once"]
    jobs = find_jobs()
    if not names and len(jobs) != 1:
        print("\n".join(jobs_table(jobs, time.monotonic())))
        return 0
    job = chosen("top", names, jobs) if names else jobs[0]
    try:
        return _once(job) if names != arguments or not is_terminal(1, os.environ) else _watch(job)
    except KeyboardInterrupt:
        print()
        return 0


def keep(history: History, answer: str) -> None:
    """Add what the ranks of a job have said; those that have ended are not in `answer`."""
    said = {each["rank"]: each for each in map(json.loads, answer.splitlines())}
    for rank in history.keys() - said.keys():
        del history[rank]
    for rank, totals in said.items():
        before = history.setdefault(rank, deque(maxlen=_KEPT))
        if before and totals["step"] < before[-1]["step"]:
            before.clear()  # a new world, or a new attempt
        before.append(totals)


def _answers(job: RunningJob) -> Iterator[History]:
    """Yield what is known of `job`, each second, until it ends."""
    history: History = {}
    while True:
        try:
            keep(history, ask(job, TOTALS))
        except TimeoutError as error:  # it is there
            raise unanswered(job, error) from error
        except (OSError, ValueError):  # it ends just now
            return
        yield history
        time.sleep(_EVERY_S)


def _screen(job: RunningJob, history: History, width: int, height: int) -> list[str]:
    rows = [row(kept[0], kept[-1]) for _, kept in sorted(history.items())]
    return [shortened(describe(job, time.monotonic()), width), *table(rows, job.size, width, height - 1)]


def _once(job: RunningJob) -> int:
    until_s = time.monotonic() + _ONCE_S
    for history in _answers(job):
        have_stepped = [kept[0]["step"] < kept[-1]["step"] for kept in history.values()]
        if (len(have_stepped) == job.size and all(have_stepped)) or time.monotonic() > until_s:
            print("\n".join(_screen(job, history, 1000, 1000)))
            return 0
    raise LauncherError(f"job {job.pid} ended before its ranks had answered")


def _watch(job: RunningJob) -> int:
    print(_HOME + _TO_END, end="")
    for history in _answers(job):
        size = shutil.get_terminal_size()
        lines = _screen(job, history, size.columns, size.lines - 1)
        print(_HOME + "".join(f"{line}{_TO_END_OF_LINE}" for line in lines), end=_TO_END, flush=True)
    print(f"job {job.pid} has ended")
    return 0
