"""Programs started as a user would start them, outside of any job that these tests may themselves be part of."""

import os
import re
import subprocess
from pathlib import Path

from tests.support.patience import patient

ROOT = Path(__file__).parents[2]
OF_JOBS = ("OMPI_", "PMI", "RINGREDUCE", "HOROVOD", "OMP_", "MASTER_")
"""How variables begin that a job, or who starts one, may have set here."""


CROWDED = re.compile(
    rf"^ringrun: \d+ ranks on \S+ share {len(os.sched_getaffinity(0))} cores?, which rarely pays off; .*\n",
    re.MULTILINE,
)
"""What ringrun says of more ranks than this machine has cores: not what a test is about."""


def environment(**changes: str | None) -> dict[str, str]:
    """This process's variables without those of jobs, and with these; None takes one away. A PYTHONPATH goes on."""
    if path := changes.get("PYTHONPATH"):
        changes["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_JOBS)}
    return {name: value for name, value in (kept | changes).items() if value is not None}


def run(
    command: list[object], *, timeout_s: float = 120, returncode: int | None = None, **options
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, which must be the returncode where one is named; what it printed need not be UTF-8.

    It has no stdin if not told otherwise.
    """
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    defaults = {"cwd": ROOT, "env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    defaults |= {"text": True, "errors": "surrogateescape", "timeout": patient(timeout_s)}
    done = subprocess.run([str(each) for each in command], **defaults | options)
    done.stdout, done.stderr = (text and CROWDED.sub("", text) for text in (done.stdout, done.stderr))
    assert returncode in (None, done.returncode), f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


def executable(path: Path, text: str) -> Path:
    """Make a program of a text that begins with #!, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def start_timeout() -> list[object]:
    """The flag that gives ranks the time to start that they take beside other jobs."""
    return ["--start-timeout", patient(30)]


def ringrun(python: Path) -> str:
    """The ringrun that stands beside this Python."""
    return str(python.with_name("ringrun"))
