"""How the ranks ended, which of them is the cause, and the report that says so. Pure functions on records."""

import re
import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from .spans import format_spans
from .wire import RankError

_TRACEBACK_HEAD = "Traceback (most recent call last):"
_CHAIN_LINES = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_MPICH_ABORT = re.compile(r"Abort\((\d+)\) on node \d+ \(rank ")
_STDERR_LINES = 20
_OTHER_RANKS = 8


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    `code` is its exit code, minus a signal, or None when its agent was lost; `sent` are the signals that ringrun
    had sent it by then; `tail` are the last lines of its stderr; `lost` says how its agent was lost.
    """

    rank: int
    host: str
    pid: int
    code: int | None
    at_s: float
    sent: tuple[int, ...] = ()
    error: RankError | None = None
    tail: tuple[str, ...] = ()
    lost: str = "its agent is gone, without a word"

    @property
    def ended_by_ringrun(self) -> bool:
        """Whether a signal of ringrun's ended it, or the shell around it (which then exits with 128 + signal)."""
        return self.code is not None and any(self.code in (-number, 128 + number) for number in self.sent)

    @property
    def failed(self) -> bool:
        """Whether it ended badly of its own accord."""
        return self.code != 0 and not self.ended_by_ringrun

    @property
    def blames(self) -> tuple[int, ...]:
        """The ranks that it says it has lost."""
        return self.error.lost_ranks if self.error else ()


def root_cause(ends: Iterable[RankEnd]) -> RankEnd | None:
    """Return the end that all the others follow from; None if no rank has failed.

    It is the first failure in time. One that blames another rank is a consequence if that rank has failed too,
    even if it did so later: a rank may hold its own failure back until it is told to end.
    """
    failures = {end.rank: end for end in ends if end.failed}
    if not failures:
        return None
    cause = min(failures.values(), key=lambda end: end.at_s)
    visited = {cause.rank}
    while blamed := [failures[rank] for rank in cause.blames if rank in failures and rank not in visited]:
        cause = min(blamed, key=lambda end: (bool(end.blames), end.at_s))
        visited.add(cause.rank)
    return cause


def aborter(ends: Iterable[RankEnd], launcher_code: int | None) -> RankEnd | None:
    """Return the end of the rank that called MPI_Abort, if mpirun ended with the code that it gave.

    Under hydra the exit code of such a rank is lost, and the others fail at the same time; but MPICH prints it.
    """
    for end in ends:
        match = next(filter(None, map(_MPICH_ABORT.match, end.tail)), None)
        if match and launcher_code and int(match[1]) & 0xFF == launcher_code:
            return replace(end, code=launcher_code)
    return None


def exit_code(end: RankEnd) -> int:
    """Return the exit code that a shell would give for `end`: 128 + n for signal n, 1 for a lost agent."""
    if end.code is None:
        return 1
    return end.code if end.code >= 0 else 128 - end.code


def in_words(end: RankEnd) -> str:
    """Return how it ended, in words: `exit code 3`, `killed by signal 9 (SIGKILL)`."""
    if end.code is None:
        return end.lost
    if end.code >= 0:
        return f"exit code {end.code}"
    number = -end.code
    name = signal.Signals(number).name if number in signal.valid_signals() and number < signal.SIGRTMIN else "unnamed"
    return f"killed by signal {number} ({name}), exit code {exit_code(end)}"


def extract_traceback(tail: Sequence[str]) -> list[str]:
    """Return the last traceback in `tail` with what follows it and the exceptions it was chained to; [] if none."""
    heads = [index for index, line in enumerate(tail) if _TRACEBACK_HEAD in line]
    if not heads:
        return []
    start = heads.pop()
    while heads and any(line in _CHAIN_LINES for line in tail[heads[-1] : start]):
        start = heads.pop()
    return list(tail[start:])


def evidence(end: RankEnd, launcher_tail: Sequence[str] = ()) -> list[str]:
    """Return the lines that show why: the exception it left, its last traceback, its last words, or mpirun's."""
    if end.error and end.error.traceback:
        return end.error.traceback.rstrip("\n").splitlines()
    if traceback := extract_traceback(end.tail):
        return traceback
    if end.tail:
        return ["the last it wrote to stderr:", *end.tail[-_STDERR_LINES:]]
    if launcher_tail:
        return ["it wrote nothing to stderr; mpirun wrote:", *launcher_tail[-_STDERR_LINES:]]
    return ["it wrote nothing to stderr"]


def report(cause: RankEnd, ends: Collection[RankEnd], size: int, launcher_tail: Sequence[str] = ()) -> list[str]:
    """Return the lines that name the other ranks that failed, and last the cause with its evidence."""
    lines = []
    others = sorted((end for end in ends if end.failed and end.rank != cause.rank), key=lambda end: end.at_s)
    for end in others[:_OTHER_RANKS]:
        blame = f", lost rank {', '.join(map(str, end.blames))}" if end.blames else ""
        lines.append(f"ringrun: rank {end.rank} failed too, on host {end.host}: {in_words(end)}{blame}")
    if len(others) > _OTHER_RANKS:
        lines.append(f"ringrun: {len(others) - _OTHER_RANKS} more ranks failed")
    pid = f", pid {cause.pid}" if cause.pid else ""
    first = f"ringrun: rank {cause.rank} of {size} failed first, on host {cause.host}{pid}: {in_words(cause)}"
    return [*lines, first, *evidence(cause, launcher_tail)]


def timeout_report(timeout_s: float, running: Collection[int], absent: Collection[int], size: int) -> str:
    """Return the line that says why the job was ended, and which ranks still ran or had not even started."""
    states = [("still ran", running), ("had not started", absent)]
    named = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {format_spans(ranks)} of {size} {state}"
        for state, ranks in states
        if ranks
    ]
    return f"ringrun: the job took longer than --timeout {timeout_s:g} s and was ended: {', '.join(named)}"
