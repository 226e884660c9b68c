"""A program that prints which hosts there are just now, a line for each as in `h1:4`: Horovod's discovery script."""

import subprocess
from collections.abc import Sequence

from ..errors import UsageError
from .host import Host
from .hostfile import parse_hostfile

_TIMEOUT_S = 30.0
_LAST_WORDS = 200


def discover(script: Sequence[str]) -> list[Host]:
    """Return the hosts that `script`, an argv, prints; UsageError where it fails or prints none."""
    where = f"--host-discovery-script {' '.join(script)}"
    try:
        done = subprocess.run(
            script, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{where}: it has not ended after {_TIMEOUT_S:g} s") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{where}: cannot be executed: {reason}") from None
    if done.returncode:
        said = done.stderr.strip()[-_LAST_WORDS:] or "(nothing)"
        raise UsageError(f"{where}: it ended with exit code {done.returncode}; it wrote: {said}")
    if not done.stdout.strip():
        raise UsageError(f"{where}: it printed no host; expected a line for each, as in 'h1:4'")
    try:
        return parse_hostfile(done.stdout, "its output")
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
