"""The preflight as a whole: asks hosts in parallel, finds what is wrong, and keeps both for those who need it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..errors import MachineError
from ..folders import current_folder, private_folder
from ..hosts import Host, Machine
from ..network import listen_everywhere, own_addresses
from ..remote import Problem, Reach, Remote
from .ask import Facts, Question, ask
from .findings import Finding, find, lines, table

_BACKLOG = 1024


@dataclass(frozen=True)
class Preflight:
    """The answers of a job's hosts, this one (`here`) always among them."""

    here: str
    answers: Mapping[str, Facts | Problem]
    findings: Sequence[Finding]

    @property
    def errors(self) -> list[Finding]:
        """What keeps the job from starting."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def answering(self) -> list[str]:
        """The hosts that have answered."""
        return [name for name, facts in self.answers.items() if isinstance(facts, Facts)]

    @property
    def machines(self) -> dict[str, Machine]:
        """Those behind the names of the hosts that have answered."""
        return {name: facts.machine for name, facts in self.answers.items() if isinstance(facts, Facts)}

    def only(self, names: Collection[str]) -> Preflight:
        """Return it as if only this host and those of `names` had been asked."""
        kept = {*names, self.here}
        answers = {name: facts for name, facts in self.answers.items() if name in kept}
        return Preflight(self.here, answers, [finding for finding in self.findings if finding.host in kept])

    def table(self) -> str:
        """Return the table of the answers."""
        return table(self.answers, self.here, self.findings)

    def warning_lines(self) -> list[str]:
        """Return a line for each warning, with its cure."""
        return lines(finding for finding in self.findings if finding.severity == "warning")

    def error_lines(self) -> list[str]:
        """Return a line for each error, with its cure."""
        return lines(self.errors)

    def automatic_size(self, host: Host) -> int:
        """Return how many ranks `host` gets if nobody says: one per GPU, else per core. MachineError if unknown."""
        facts = self.answers[host.name]
        if isinstance(facts, Problem):
            raise MachineError(f"{host.name}: {facts.what}; {facts.cure}")
        return facts.ranks

    def require_no_errors(self) -> None:
        """Raise MachineError that names all errors, a line each."""
        if found := self.error_lines():
            more = "" if len(found) == 1 else f"{len(found)} things are wrong with the hosts; no rank was started:\n  "
            raise MachineError(more + "\n  ".join(found))


def check(
    hosts: Sequence[Host],
    remote: Remote,
    python: str,
    command: str | None = None,
    directory: str | None = None,
    *,
    addresses: Sequence[tuple[str, int]] = (),
    timeout_s: float = 30.0,
) -> Preflight:
    """Ask this host and all `hosts`, at the same time, and return what they have and what is wrong.

    python:     the interpreter of the job, an absolute path.
    command:    the program of the ranks, an absolute path.
    directory:  where the ranks start; the current folder by default.
    addresses:  where this host listens: from each host a connection to one of them must come about.
    """
    names = list(dict.fromkeys(host.name for host in hosts))
    here = next((name for name in names if remote.is_here(name)), remote.own_name)
    programs = [program for program in (command, sys.executable) if program is not None and program != python]
    question = Question(python, directory or current_folder(), programs, addresses, sys.executable, timeout_s)
    asked = names if here in names else [here, *names]
    answers = ask(asked, remote, question, os.environ)
    if here not in names and isinstance(own := answers[here], Facts):
        answers[here] = dataclasses.replace(own, missing_directory=False)  # no rank starts here
    return Preflight(here, answers, find(answers, here, question))


def check_job(
    hosts: Sequence[Host],
    python: str,
    command: str | None = None,
    folder: str | None = None,
    *,
    reach: Reach,
    interfaces: Sequence[str] = (),
) -> Preflight:
    """Ask this host and all `hosts`; returns what they have and what is wrong. See `check` for the rest.

    reach:       how the others are reached.
    interfaces:  those of this host that the others are to connect to; empty: whichever work.
    """
    with ExitStack() as stack:
        directory = stack.enter_context(private_folder())
        remote = reach.remote(directory)
        addresses: list[tuple[str, int]] = []
        if others := [host.name for host in hosts if not remote.is_here(host.name)]:
            # the kernel answers those that connect
            port = stack.enter_context(listen_everywhere(_BACKLOG)).getsockname()[1]
            found = sorted(own_addresses(others, interfaces), key=lambda address: ":" in address)  # MPICH needs IPv4
            addresses = [(address, port) for address in found]
        return check(hosts, remote, python, command, folder, addresses=addresses, timeout_s=reach.timeout_s)
