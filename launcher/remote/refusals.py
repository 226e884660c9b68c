"""Why a host did not run a program: what ssh, srun and the remote shell wrote, turned into one problem with its cure.

Pure functions of text. ssh's own texts are not translated; what no rule knows is shown as it was written.
"""

from __future__ import annotations

import re

from ..text import shortened
from .base import Problem

_MAX_SHOWN = 200
_OF_HOST = re.compile(r"(ssh: )?(connect to host \S+ (?=port )|[^\s@]+@\S+: )")
_HOST_NAME = re.compile(r"hostname \S+: ")
_FORGET = re.compile(r'ssh-keygen -f "[^"\n]+" -R "[^"\n]+"')
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


READ_BEFORE = "ringrun: standard input has been read before"
"""What the remote script writes where it has not got its words."""

_KEY_CURE = (
    "name the key with -i FILE, or install it: ssh-copy-id HOST; a key with a passphrase needs an agent: ssh-add. "
    "Another user name there belongs in ~/.ssh/config"
)
_FIREWALL_CURE = "check that HOST is up and its network reaches this host: ping HOST; a firewall may drop ssh's packets"
_NAME_CURE = "correct the name, or make it known here: getent hosts HOST, /etc/hosts, ~/.ssh/config"

# what ssh writes, and the problem and the cure that it means: TEXT stands for the line, HOST for the host's name;
# the first that fits counts: the more exact before what follows from it
_RULES = (
    (
        READ_BEFORE,
        "its login scripts read standard input, and thus consume what ringrun sends",
        "make ~/.bashrc, ~/.ssh/rc or the like on HOST read stdin only if it is a terminal: [ -t 0 ] && …",
    ),
    (
        r"remote host identification has changed|host key for .* has changed",
        "its host key has changed since this host saw it last (Host key verification failed)",
        "make sure that it is the same host (was it reinstalled?), then: ssh-keygen -R HOST; ssh HOST",
    ),
    (
        r"host key verification failed|no .* host key is known for",
        "its host key is not known to this host (Host key verification failed)",
        "accept it once by hand, for the same user: ssh HOST; or for many: ssh-keyscan HOST >> ~/.ssh/known_hosts",
    ),
    (
        r"^load key .*: (bad permissions|invalid format|error in libcrypto|incorrect passphrase)|unprotected private",
        "the private key cannot be used (TEXT)",
        "a private key belongs to its user alone: chmod 600 FILE; -i wants the private key, not the .pub",
    ),
    (
        r"permission denied|too many authentication failures|no (more )?supported authentication methods",
        "ssh is refused there (TEXT)",
        _KEY_CURE,
    ),
    (r"could not resolve hostname|name or service not known", "its name is not known here (TEXT)", _NAME_CURE),
    (
        r"connection refused",
        "it refuses the connection (TEXT): no ssh server listens on that port",
        "start sshd there, or name its port with -p PORT",
    ),
    (r"no route to host|network is unreachable|host is down", "it cannot be reached (TEXT)", _FIREWALL_CURE),
    (r"timed out", "it did not answer in time (TEXT)", _FIREWALL_CURE + "; or allow more: --start-timeout S"),
    (
        r"kex_exchange_identification|connection (closed|reset) by|banner|protocol mismatch",
        "it took the connection and closed it (TEXT)",
        "see the log of sshd there; is it an ssh server's port (-p)? MaxStartups may be too small for many at once",
    ),
)


def ssh_problem(host: str, code: int, text: str, not_run: str = "") -> Problem:
    """Return what `text` means, that ssh wrote when it ended with `code` and the program had not been run.

    not_run:  why ssh itself could not be executed here, if it could not.
    """
    if not_run:
        return Problem(
            f"ssh cannot be executed on this host: {not_run}",
            "install OpenSSH's client (openssh-client, openssh-clients), or start ringrun where it is",
        )
    for pattern, what, cure in _RULES:
        if match := re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
            if forget := _FORGET.search(text):  # ssh says itself how its file calls a host with a port
                cure = cure.replace("ssh-keygen -R HOST", _short(forget[0]))
            what = what.replace("TEXT", _short(_line_around(text, match.start())))
            return Problem(what, cure.replace("HOST", host))
    return Problem(
        f"ssh ended with {_code(code)} and wrote: {_short(_last_line(text)) or 'nothing'}",
        f"try it by hand: ssh {host} true",
    )


def program_problem(program: str, code: int, text: str) -> Problem | None:
    """Return why the shell could not start `program`, None if it could: exit codes 126 and 127 are a shell's own."""
    said = f" ({_short(_last_line(text))})" if text.strip() else ""
    if code == _NOT_FOUND:
        return Problem(
            f"{program} is not there{said}",
            "give every host the same Python at the same path: the same virtual environment, or a shared folder",
        )
    if code == _NOT_EXECUTABLE:
        return Problem(
            f"{program} cannot be executed there{said}",
            "check its permissions and that it was built for that host's processor",
        )
    return None


def srun_problem(code: int | None, text: str, not_run: str, timeout_s: float) -> Problem:
    """Return why a node has not answered, from what srun itself wrote."""
    if not_run:
        return Problem(f"srun cannot be executed on this host: {not_run}", "check that Slurm's srun is on PATH")
    if code is None:
        return took_too_long(timeout_s, text)
    line = _short(next((line for line in text.splitlines() if "error:" in line), _last_line(text)))
    return Problem(
        f"Slurm did not run a program there; srun ended with {_code(code)} and wrote: {line or 'nothing'}",
        "see the node's state: sinfo -N -l, scontrol show node; and whether the job still runs: squeue",
    )


def took_too_long(timeout_s: float, text: str) -> Problem:
    """Return the problem of a host that has not answered within the limit, having written `text`."""
    said = f"; its last line: {_short(_last_line(text))}" if text.strip() else ""
    return Problem(
        f"no answer within {timeout_s:g} s{said}",
        "see whether the host is overloaded or a network folder hangs there, or allow more: --start-timeout S",
    )


def _line_around(text: str, position: int) -> str:
    """Return the line of `text` at `position`, without the host, so that those of many hosts are reported once."""
    begin = text.rfind("\n", 0, position) + 1
    return _HOST_NAME.sub("hostname: ", _OF_HOST.sub("", text[begin:].split("\n", 1)[0], count=1))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _short(text: str) -> str:
    """Return `text` for a message: one line, nothing that a terminal would interpret."""
    clean = "".join(character if character.isprintable() else "?" for character in text.strip().removeprefix("ssh: "))
    return shortened(clean, _MAX_SHOWN)


def _code(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
