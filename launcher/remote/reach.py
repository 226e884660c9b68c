"""How the other hosts of a job are reached: over ssh, or through the Slurm job that ringrun runs in.

Both ringrun (before a job, and after it) and an MPI's launcher start programs there; only this file knows how.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ..hosts import Found
from ..ssh import FILE_NAME, SshOptions, config_text, ssh_argv
from .hosts import Remote
from .over_slurm import Slurm
from .over_ssh import Ssh

_GRACE_S = 1.0


class Reach:
    """One way to reach other hosts. `directory` is ringrun's private one, which stays as long as what it gets."""

    timeout_s: float
    """How long a host may take to run a program."""

    gpus_are_chosen = False
    """Each host has its own word, and not this host's, on which of its GPUs are the job's."""

    sends_environment = True
    """The other hosts get this one's variables; else they keep their own, beside settings and what --env names."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Variables for the MPI's launcher."""

    departures: socket.socket | None = None
    """Over which comes a datagram for each host that leaves the job: HostLeft, in JSON; None: nobody would say so."""

    address = ""
    """This host's, where the other hosts reach it; empty: they know it by its name."""

    _runner: ClassVar[type[Ssh]] = Ssh

    def rsh(self, directory: str) -> Sequence[str]:
        """Return the argv that `host command …` follows; empty where an MPI's launcher asks Slurm itself."""
        return ()

    def files(self, aliases: Mapping[str, str]) -> Mapping[str, str]:
        """Return the files in `directory` that `rsh` needs, their texts by their names.

        aliases: what the launcher calls hosts that have no name, and their addresses.
        """
        return {}

    def remote(self, directory: str, timeout_s: float = 0.0) -> Remote:
        """Return what runs programs on the hosts, each of which may take `timeout_s`, if not as long as it says."""
        for name, text in self.files({}).items():
            Path(directory, name).write_bytes(os.fsencode(text))
        timeout_s = timeout_s or self.timeout_s
        # what is called there has a limit of its own, which comes first: it says what it waited for
        return Remote(self._runner(self.rsh(directory), timeout_s), timeout_s + _GRACE_S)


@dataclass(frozen=True)
class OverSsh(Reach):
    """Over ssh, as the user's own configuration and these options say."""

    options: SshOptions = field(default_factory=SshOptions)

    @property
    def timeout_s(self) -> float:  # type: ignore[override]
        """See `Reach`."""
        return self.options.connect_timeout_s

    def rsh(self, directory: str) -> Sequence[str]:
        """See `Reach`."""
        return ssh_argv(directory)

    def files(self, aliases: Mapping[str, str]) -> Mapping[str, str]:
        """See `Reach`."""
        return {FILE_NAME: config_text(self.options, aliases)}


@dataclass(frozen=True)
class OverSlurm(Reach):
    """Through srun, also where an MPI's launcher calls it: with these variables, and in an interactive step too."""

    timeout_s: float
    gpus_are_chosen = True
    environment: ClassVar[Mapping[str, str]] = {"SLURM_EXPORT_ENV": "ALL", "SLURM_OVERLAP": "1"}

    def remote(self, directory: str, timeout_s: float = 0.0) -> Remote:
        """See `Reach`."""
        return Remote(Slurm("srun", timeout_s or self.timeout_s), timeout_s or self.timeout_s)


def reach_of(found: Found | None, ssh: SshOptions) -> Reach:
    """Return how the hosts that were found are reached."""
    return OverSlurm(ssh.connect_timeout_s) if found and found.in_slurm else OverSsh(ssh)
