"""Hostfiles, and what a discovery script prints, each line recognised by itself:

    h1 slots=4 max_slots=8      Open MPI; Horovod without max_slots
    h1:4                        MPICH (hydra), Intel MPI, Horovod
    h1                          any; a name that stands on several lines has a slot on each, as in PBS_NODEFILE
    # a comment, also behind a host

Other things that these launchers read there (a user, a port, a binding) would change what is started, so
it is refused with the place where it belongs, and never passed over.
"""

import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..processes import how_ended, signal_group, start_with_parent, why_not_started
from ..text import close_matches, quoted
from .host import Host, merge, parse_host, parse_slots

_SLOTS = ("slots", "count", "cpu")  # one and the same to Open MPI
_MAX_SLOTS = tuple(
    f"{first}{dash}{then}" for name in _SLOTS for dash in "_-" for first, then in (("max", name), (name, "max"))
)
_KNOWN = (*_SLOTS, *_MAX_SLOTS)

_SSH_CONFIG = "ringrun does not read it here; put it into ~/.ssh/config for this host"
_REFUSED = {
    **dict.fromkeys(("user", "username", "user-name", "user_name", "port"), _SSH_CONFIG),
    "binding": "ringrun does not bind ranks host by host; take it out",
}

_LINE_END = re.compile(r"\r\n?|\n")
_AROUND_EQUALS = re.compile(" ?= ?")  # Open MPI allows `slots = 4`
_TIMEOUT_S = 30.0  # of a program that prints hosts
_LOOK_S = 0.1
_MOST_BYTES = 16 << 20  # of its output
_running: set[int] = set()  # such programs, which lead their process groups
_LAST_WORDS = 200
_EXAMPLE = "a line for each host, as in 'h1 slots=4' or 'h1:4'"


def read_hostfile(path: str) -> list[Host]:
    """Return the hosts in the file `path`; UsageError if it cannot be read or understood."""
    return parse_hostfile(read_text(path), path)


def read_text(path: str) -> str:
    """Return the text of the file `path`; UsageError if there is none."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"hostfile {path}: no such file") from None
    except IsADirectoryError:
        raise UsageError(f"hostfile {path}: a folder; expected a file with {_EXAMPLE}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"hostfile {path}: not UTF-8 at byte {error.start}; save it as UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"hostfile {path}: cannot be read: {reason}") from None


def discover(script: Sequence[str]) -> list[Host]:
    """Return the hosts that `script`, the argv of --host-discovery-script, prints; UsageError where that fails."""
    where = f"--host-discovery-script {' '.join(script)}"
    try:
        done = _run(script)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{where}: it did not end within {_TIMEOUT_S:g} s") from None
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (OSError, ValueError) as error:
        reason = why_not_started(error, script[0]) if isinstance(error, OSError) else error
        raise UsageError(f"{where}: cannot be executed: {reason}") from None
    if done.returncode:
        said = done.stderr.strip()[-_LAST_WORDS:] or "(nothing)"
        raise UsageError(f"{where}: it {how_ended(done.returncode)}; it wrote: {said}")
    if not done.stdout.strip():
        raise UsageError(f"{where}: it printed no host; expected a line for each, as in 'h1:4'")
    try:
        return parse_hostfile(done.stdout, "its output")
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def stop_discovery() -> None:
    """End the scripts that `discover` runs in other threads, with all that they have started."""
    for leader in _running.copy():
        signal_group(leader, signal.SIGKILL)


def _run(script: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run a script to its end. One that takes too long is ended, and what it has started, which may hold its pipes."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_with_parent(script, signal.SIGKILL, **streams, start_new_session=True) as process:
        _running.add(process.pid)
        try:
            out, err = (data.decode(errors="replace") for data in _said_by(process))
        except BaseException:
            signal_group(process.pid, signal.SIGKILL)
            raise
        finally:
            _running.discard(process.pid)
    return subprocess.CompletedProcess(list(script), process.returncode, out, err)


def _said_by(process: "subprocess.Popen[bytes]") -> tuple[bytes, bytes]:
    """What it writes until it ends: a program that it leaves behind, as ssh's ControlPersist does, keeps its pipes."""
    until_s = time.monotonic() + _TIMEOUT_S
    while True:
        has_ended = process.poll() is not None
        try:
            return process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired as so_far:
            if len(so_far.output or b"") + len(so_far.stderr or b"") > _MOST_BYTES:
                raise UsageError(f"it printed more than {_MOST_BYTES >> 20} MiB; expected {_EXAMPLE}") from None
            if has_ended:
                return so_far.output or b"", so_far.stderr or b""
            if time.monotonic() > until_s:
                raise


def parse_hostfile(text: str, source: str) -> list[Host]:
    """Return the hosts in `text`, each once; UsageError names `source`, the line and what was expected.

    A host without slots leaves them unsaid (None), unless a name without slots is repeated.
    """
    mentions = []
    for number, line in enumerate(_LINE_END.split(text.removeprefix("\ufeff")), 1):
        content = line.partition("#")[0]
        words = _AROUND_EQUALS.sub("=", " ".join(content.split())).split()
        if words:
            mentions.append(_parse_line(words, f"{source}:{number}: {quoted(content.strip())}"))
    if not mentions:
        raise UsageError(f"hostfile {source}: no host in it; expected {_EXAMPLE}")
    return merge(mentions)


def _parse_line(words: list[str], where: str) -> Host:
    host = parse_host(words[0], where)
    slots, most = host.slots, None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{where}: expected key=value behind the host, as in slots=4, got {quoted(word)}")
        if key in _SLOTS and slots is None:
            slots = parse_slots(value, f"{where}: {key}")
        elif key in _MAX_SLOTS and most is None:
            most = parse_slots(value, f"{where}: {key}")
        else:
            raise UsageError(f"{where}: {_why_not(key)}")
    # Above `slots` Open MPI fills a host up to max_slots when it may oversubscribe; ringrun never passes the slots.
    if slots is not None and most is not None and most < slots:
        raise UsageError(f"{where}: expected max_slots to be at least slots={slots}, got {most}")
    return Host(host.name, most if slots is None else slots)


def _why_not(key: str) -> str:
    if key in _KNOWN:
        return f"{key}: the slots are given twice; give them once"
    if key in _REFUSED:
        return f"{key}=: {_REFUSED[key]}"
    nearest = close_matches(key, [*_KNOWN, *_REFUSED])
    guess = f"; did you mean {nearest[0]}=?" if nearest else ""
    return f"unknown key {quoted(key)}, expected slots= or max_slots={guess}"
