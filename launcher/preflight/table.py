"""A readable table of the hosts' answers: a row for each host, equal ones together, a `*` behind what is wrong.

    host         Python  ringreduce  mpi4py  NumPy  MPI              ranks    clock   /dev/shm
    n1 (here)    3.11.2  0.1.0       4.1.2   2.4.1  Open MPI 5.0.11  8 GPUs   0.0 s   34 GB
    n[2-4]       3.11.2  0.1.0       4.1.2   2.4.1  Open MPI 5.0.11  8 GPUs   0.0 s   31 GB
    n5           3.10.4* 0.1.0       -*      2.4.1  -                8 cores  +3.2 s* 34 GB
    n6 *         connection refused …

Where a group's names are long, they stand above its row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ..hosts import fold_names
from ..remote import Problem
from ..text import columns, counted, shortened
from .ask import Facts
from .findings import SHM, Finding, short_mpi

_LONGEST_CELL = 18
_LONGEST_HOST = 24
_ALWAYS_ALIKE = ("clock", SHM)  # measured, never quite equal: of a group the worst is shown


def table(answers: Mapping[str, Facts | Problem], here: str, findings: Sequence[Finding]) -> str:
    """Return the table of the hosts' `answers`; `findings` are marked in it."""
    marks: dict[str, set[str]] = {}
    for finding in findings:
        marks.setdefault(finding.host, set()).add(finding.column)
    rows, silent = _rows(answers, here, marks)
    hosts = [label if len(label) <= _LONGEST_HOST else "" for label, _ in rows]
    header, *cells = columns([["host", *_CELLS], *([host, *row] for host, (_, row) in zip(hosts, rows, strict=True))])
    lines = [header] if rows else []
    for host, (label, _), line in zip(hosts, rows, cells, strict=True):
        lines += [line] if host else [label, line]
    return "\n".join([*lines, *(f"{label} *  {what}" for label, what in silent)])


def _cut(cell: str, width: int) -> str:
    """Return `cell` in at most `width` characters, with its mark."""
    mark = "*" if cell.endswith("*") else ""
    return shortened(cell[: len(cell) - len(mark)], width - len(mark)) + mark


def _rows(
    answers: Mapping[str, Facts | Problem], here: str, marks: Mapping[str, Collection[str]]
) -> tuple[list[tuple[str, list[str]]], list[tuple[str, str]]]:
    """Return the rows of those that have answered, and those of the others with why."""
    groups: dict[tuple[object, ...], list[str]] = {}
    silent: dict[str, list[str]] = {}
    for host, facts in answers.items():
        if isinstance(facts, Problem):
            silent.setdefault(facts.what, []).append(host)
            continue
        own = frozenset(marks.get(host, ()))
        cells = [cell(facts) for column, cell in _CELLS.items() if column not in _ALWAYS_ALIKE]
        groups.setdefault((host == here, own, *cells), []).append(host)
    rows = []
    for (is_here, own_marks, *_), hosts in groups.items():
        all_facts = [facts for host in hosts if isinstance(facts := answers[host], Facts)]
        assert isinstance(own_marks, frozenset)
        mark = " *" if "host" in own_marks else ""
        label = f"{fold_names(hosts)}{' (here)' if is_here else ''}{mark}"
        rows.append((label, [_shown(all_facts, column, column in own_marks) for column in _CELLS]))
    return rows, [(fold_names(hosts), what) for what, hosts in silent.items()]


def _shown(facts: Sequence[Facts], column: str, marked: bool) -> str:
    """Return the cell of a group: of what is measured the worst."""
    worst = facts[0]
    if column == "clock":
        worst = max(facts, key=lambda each: abs(each.clock_skew_s))
    elif column == SHM:
        worst = min(facts, key=lambda each: each.shm_bytes or 0)
    return _cut(_CELLS[column](worst) + "*" * marked, _LONGEST_CELL)


def _bytes(count: int) -> str:
    return f"{count / 1e9:.0f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


_CELLS: dict[str, Callable[[Facts], str]] = {
    "Python": lambda facts: facts.python,
    "ringreduce": lambda facts: facts.ringreduce.text or "-",
    "mpi4py": lambda facts: facts.mpi4py.text or "-",
    "NumPy": lambda facts: facts.numpy.text or "-",
    "MPI": lambda facts: short_mpi(facts.mpi.text) or "-",
    "ranks": lambda facts: counted(facts.ranks, "GPU" if facts.gpus else "core"),
    "clock": lambda facts: f"{facts.clock_skew_s:+.1f} s" if abs(facts.clock_skew_s) >= 0.05 else "0.0 s",
    SHM: lambda facts: "-" if facts.shm_bytes is None else _bytes(facts.shm_bytes),
}
