"""A job with process numbers, a /dev/shm and a TMPDIR of its own: what it leaves is seen."""

import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.support import jobs

LONGEST_S = 150.0  # a job that has not ended by then hangs
ISOLATED = ["unshare", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
IN_PRIVATE = """mount -t tmpfs shm /dev/shm && { "$@"; code=$?; for again in 1 2 3 4 5; do
ps -e -o stat=,args= | grep -v -e ^Z -e ' ps -e' -e 'sh -c mount' -e grep > "$LEFT" || break; sleep 1; done
ls -A /dev/shm "$TMPDIR" | grep -v -e : -e '^$' >> "$LEFT"; exit $code; }"""


class Ended(NamedTuple):
    """How a job has ended."""

    seconds: float
    printed: str
    code: int | None
    """None: it hangs."""
    left: list[str]
    """Processes, and names in /dev/shm and TMPDIR."""


def run(command: list[object], **variables: str) -> Ended:
    """Run a job to its end, with these variables."""
    with tempfile.TemporaryDirectory() as name:
        left, temporary = Path(name, "left"), Path(name, "t")
        temporary.mkdir()
        shell = [*ISOLATED, "sh", "-c", IN_PRIVATE, "sh", *command]
        environ = jobs.environment(**variables, TMPDIR=str(temporary), LEFT=str(left))
        began_s = time.monotonic()
        try:
            done = jobs.run(shell, timeout_s=LONGEST_S, env=environ, stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired as late:
            return Ended(time.monotonic() - began_s, (late.stdout or b"").decode(errors="replace"), None, [])
        return Ended(time.monotonic() - began_s, done.stdout, done.returncode, left.read_text().splitlines())
