"""How other hosts are reached over ssh: a configuration file for the `ssh` of the user, and the command that uses it.

What ringrun needs of ssh (port, key, that it never asks a question, how long it tries) stands in a file of its own,
which includes the user's and the system's. So everybody who calls ssh for this job, ringrun or an MPI, gets the same
few words without a space or a quote in them, and host keys are checked as ssh does by default.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .arguments import parse_port
from .errors import UsageError
from .folders import absolute
from .network import LOST_AFTER_S

FILE_NAME = "ssh_config"
_INCLUDED = ("~/.ssh/config", "/etc/ssh/ssh_config")


@dataclass(frozen=True)
class SshOptions:
    """What the user has said about ssh: -p, -i, --start-timeout and --lost-after; None leaves it to the user's own
    configuration."""

    port: int | None = None
    identity_file: str | None = None
    connect_timeout_s: float = 30.0
    lost_after_s: float = LOST_AFTER_S


def check_identity_file(path: str, flag: str) -> str:
    """Return the absolute path of a private key; UsageError if ssh could not use it."""
    found = absolute(os.path.expanduser(path))
    if not os.path.isfile(found):
        raise UsageError(f"{flag} {path}: no such file; expected a private key, as in ~/.ssh/id_ed25519")
    if not os.access(found, os.R_OK):
        raise UsageError(f"{flag} {path}: this user cannot read it")
    if '"' in found or "${" in found or not found.isprintable():
        raise UsageError(f"{flag} {path}: ssh cannot take a path with a quote, ${{ or a control character in it")
    return found


def parse_ssh(
    port: str | None, identity_file: str | None, timeout_s: float, lost_after_s: float = LOST_AFTER_S
) -> SshOptions:
    """Return what -p and -i say; ssh tries to connect for `timeout_s`, and gives a silent host up."""
    return SshOptions(
        None if port is None else parse_port(port, "--ssh-port"),
        None if identity_file is None else check_identity_file(identity_file, "--ssh-identity-file"),
        timeout_s,
        lost_after_s,
    )


def config_text(options: SshOptions, aliases: Mapping[str, str]) -> str:
    """Return the text of the file: what is said first counts, so ours stands before what is included.

    BatchMode: a job that waits for a password which nobody can type would hang. The keepalives end a connection
    to a host that has gone away. `aliases` are names that stand for addresses, whose host keys are looked for.
    """
    lines = [
        # of these ssh expands % in the second one
        *(f"Host {name}\nHostName {_escaped(host)}\nHostKeyAlias {host}" for name, host in aliases.items()),
        "Match all",
        "BatchMode yes",
        f"ConnectTimeout {max(1, round(options.connect_timeout_s))}",
        f"ServerAliveInterval {max(1, int(options.lost_after_s / 4))}",
        "ServerAliveCountMax 3",
        "LogLevel ERROR",
    ]
    if options.port is not None:
        lines.append(f"Port {options.port}")
    if options.identity_file is not None:
        quoted = _escaped(options.identity_file).replace("\\", "\\\\")
        lines.append(f'IdentityFile "{quoted}"')
    return "\n".join([*lines, *(f"Include {path}" for path in _INCLUDED), ""])


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def ssh_argv(directory: str) -> list[str]:
    """Return the argv that `host command …` follows, for a file in ringrun's private `directory`."""
    return ["ssh", "-F", str(Path(directory) / FILE_NAME)]
