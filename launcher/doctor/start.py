"""Starts the job that measures the links: ringrun itself, with one rank on each host.

A process of its own, since a job prints on stdout, and here its lines are figures.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from ..hosts import Host
from ..job.plan import run_module
from .worker import rounds

_PACKAGE = __package__.partition(".")[0]
_ROUND_S = 15.0
_GRACE_S = 30.0
_SHOWN_LINES = 12


def command(hosts: Sequence[str], flags: Sequence[str], timeout_s: float) -> list[str]:
    """Return the argv of the job; `flags` are ringrun's own, as in `-p 2222`."""
    slots = ",".join(str(Host(name, 1)) for name in hosts)
    worker = [sys.executable, *run_module(f"{_PACKAGE}.doctor.worker")]
    own = ["-np", str(len(hosts)), "-H", slots, "--timeout", f"{timeout_s:g}", "--no-bind"]
    return [sys.executable, *run_module(_PACKAGE), *own, *flags, *worker]


def measure(hosts: Sequence[str], flags: Sequence[str], start_timeout_s: float) -> tuple[list[str], str]:
    """Run the job to its end; return its ranks' lines, and if it failed, how.

    It has `start_timeout_s` for its start, and some seconds for each round of pairs.
    """
    timeout_s = start_timeout_s + _ROUND_S * len(rounds(len(hosts)))
    argv = command(hosts, flags, timeout_s)
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s + _GRACE_S)
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its ranks
            process.wait()
    failure = (_why(stderr) or f"exit code {process.returncode}") if process.returncode else ""
    return stdout.splitlines(), failure


def _why(stderr: str) -> str:
    """Return the lines that ringrun's own error begins with; where there is none, the last ones."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    begin = next((at for at, line in enumerate(lines) if line.startswith("ringrun: error:")), -_SHOWN_LINES)
    return "\n".join(lines[begin:][:_SHOWN_LINES])
