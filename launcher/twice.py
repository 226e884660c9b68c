"""`ringrun --twice N`: the job runs twice, N steps each, and the second run compares the bits of all that is reduced.

Each rank keeps and compares its own (ringreduce/checks/twice.py), in a folder on its host; rank 0 of the second run
says what differs, and its exit code is 1 then.
"""

from collections.abc import Callable
from dataclasses import replace

from .arguments import whole
from .errors import UsageError
from .folders import private_folder
from .job.plan import Job

_MOST_STEPS = 1_000_000


def parse_steps(text: str | None, flag: str, job: Job) -> int:
    """Return the number of steps, 0 without the flag; UsageError for what cannot run twice alike."""
    if text is None:
        return 0
    if job.elastic or job.restarts:
        raise UsageError(
            f"{flag}: a job that continues after failures does not run the same way twice; leave out --elastic and "
            "--restarts"
        )
    return whole(text, flag, 1, _MOST_STEPS)


def run(job: Job, steps: int, run_once: Callable[[Job], int]) -> int:
    """Run the job twice; return the second exit code, or the first one that is not 0."""
    with private_folder() as folder:
        for number in (1, 2):
            twice = {"RINGREDUCE_TWICE": f"{number}:{steps}:{folder}"}
            # the second report replaces one, the ranks' output does not
            if code := run_once(replace(job, variables={**job.variables, **twice}, appends=number == 2)):
                return code
    return 0
