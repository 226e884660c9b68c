"""How the ranks ended, which of them is the cause, and the report that says so. Pure functions on records."""

import re
import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..connection.wire import RankError
from ..text import numbered, was

_TRACEBACK_HEAD = "Traceback (most recent call last):"
_CRASH_HEAD = "Fatal Python error: "
_CRASH_MODULES = "Extension modules: "  # all that are loaded, hundreds for some programs
_CHAIN_LINES = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_MPICH_ABORT = re.compile(r"Abort\((\d+)\) on node \d+ \(rank ")
APPLICATION_ABORT = re.compile(rf"{_MPICH_ABORT.pattern}.*: application called MPI_Abort")
_OPENMPI_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d+) in")
_STDERR_LINES = 20
LAST_WORDS = "last lines on stderr:"
"""How the line of a card ends below which a rank's own last lines stand."""
SILENT = "wrote nothing to stderr"
_SHELLS_OFFSET = 128
_FATAL: dict[int, str] = {
    signal.SIGKILL: "",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGBUS: "bus error, as when /dev/shm is full",
    signal.SIGABRT: "abort",
    signal.SIGFPE: "arithmetic error",
    signal.SIGILL: "illegal instruction",
    signal.SIGXCPU: "CPU time limit",
    signal.SIGXFSZ: "file size limit",
    signal.SIGTERM: "",
}
"""Signals that end programs, with what their names do not say to everybody."""
_OTHER_RANKS = 8


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    `code` is its exit code, minus a signal, or None when its agent was lost; `sent` are the signals that ringrun
    had sent it by then; `tail` are the last lines of its stderr; `oom` is what is known of the kernel's OOM killer;
    `lost` says how its agent was lost.
    """

    rank: int
    host: str
    pid: int
    code: int | None
    at_s: float
    sent: tuple[int, ...] = ()
    error: RankError | None = None
    tail: tuple[str, ...] = ()
    device: str = ""
    ran_s: float | None = None
    oom: str = ""
    lost: str = "its agent disappeared without a message"

    @property
    def failed(self) -> bool:
        """Whether it ended badly, and not by a signal of ringrun's, after which a shell exits with 128 + signal."""
        return self.code != 0 and all(self.code not in (-number, 128 + number) for number in self.sent)

    @property
    def blames(self) -> tuple[int, ...]:
        """The ranks that it says it has lost."""
        return self.error.lost_ranks if self.error else ()


def root_cause(
    ends: Iterable[RankEnd], lost_peer_code: int | None = None, left: Collection[int] = ()
) -> RankEnd | None:
    """Return the end that all the others follow from; None if no rank has failed.

    It is the first failure in time. One that blames another rank is a consequence if that rank has failed too,
    even if it did so later: a rank may hold its own failure back until it has to end. An error that all ranks raise for
    what one of them has is a consequence, too.

    lost_peer_code: with this exit code the MPI itself ends a rank that has lost another (engines: `lost_peer_code`).
                    That may be heard of before the loss is. Such an end is a consequence of any other failure but those
                    that a signal of ringrun's may have led to.
    left:           the ranks that have left in order. Where others fail for want of one of them, and then the MPI ends
                    it, or crashes in it, that is a consequence.

    A crash inside of the MPI is a consequence, too, where another rank raised an error of its own: MPICH may crash in
    sending to a process that is about to end, which is heard of later.
    """
    failures = {end.rank: end for end in ends if end.failed}
    missed = {rank for end in failures.values() for rank in end.blames if rank in left and rank in failures}
    codes = {rank: failures[rank].code for rank in missed}
    ended = {rank for rank, code in codes.items() if code is not None and (code == lost_peer_code or code < 0)}
    failures = {rank: end for rank, end in failures.items() if rank not in ended} or failures
    if not failures:
        return None
    cause = min(failures.values(), key=lambda end: end.at_s)
    if cause.code is not None and cause.code == lost_peer_code:
        unasked = [end for end in failures.values() if not end.sent or end.code is None or end.code < 0]
        others = [end for end in unasked if end.code != lost_peer_code]
        cause = min(others, key=lambda end: end.at_s, default=cause)
    visited = {cause.rank}
    while blamed := [failures[rank] for rank in cause.blames if rank in failures and rank not in visited]:
        cause = min(blamed, key=lambda end: (bool(end.blames), end.at_s))
        visited.add(cause.rank)
    if _crashed_in_mpi(cause):
        cause = min(filter(_raised_by_itself, failures.values()), key=lambda end: end.at_s, default=cause)
    return failures.get(cause.error.culprit, cause) if cause.error else cause


def _raised_by_itself(end: RankEnd) -> bool:
    """Whether an error that blames no rank ended it; in later worlds of elastic jobs the blame is gone from errors."""
    return bool(end.error and end.error.exception != "PeerLostError" and not end.blames and not end.sent)


def _crashed_in_mpi(end: RankEnd) -> bool:
    """Whether a signal of its own ended it in a call of the MPI by ringreduce, and no error before."""
    frames = [line for line in extract_traceback(end.tail) if line.lstrip().startswith("File ")]
    by_signal = end.code is not None and end.code < 0 and end.error is None
    return by_signal and any("/ringreduce/transport/" in line for line in frames[:1])


def aborter(ends: Iterable[RankEnd], launcher_code: int | None) -> RankEnd | None:
    """Return the end of the rank that called MPI_Abort, if mpirun ended with the code that it gave.

    Under hydra the exit code of such a rank is lost, and the others fail at the same time; but MPICH prints it.
    """
    for end in ends:
        match = next(filter(None, map(_MPICH_ABORT.match, end.tail)), None)
        if match and launcher_code and int(match[1]) & 0xFF == launcher_code:
            return replace(end, code=launcher_code)
    return None


def aborted(launcher_tail: Iterable[str]) -> str:
    """Return which rank called MPI_Abort, if mpirun has said so before it ended; else nothing."""
    match = next(filter(None, map(_OPENMPI_ABORT.search, launcher_tail)), None)
    return f"rank {match[1]} called MPI_Abort" if match else ""


def exit_code(end: RankEnd) -> int:
    """Return the exit code that a shell would give for `end`: 128 + n for signal n, 1 for a lost agent."""
    if end.code is None:
        return 1
    return end.code if end.code >= 0 else 128 - end.code


def in_words(end: RankEnd) -> str:
    """Return how it ended, in words: `exit code 3`, `killed by signal 11 (SIGSEGV, segmentation fault), exit code 139`.

    A shell returns an exit code above 128 for the signal that ended what it ran; other programs mean something else.
    """
    if end.code is None:
        return end.lost
    if end.code < 0:
        return f"killed by signal {-end.code} ({_signal_name(-end.code)}), exit code {exit_code(end)}"
    number = end.code - _SHELLS_OFFSET
    if number in _FATAL:
        return f"exit code {end.code}: what a shell returns after signal {number} ({_signal_name(number)})"
    return f"exit code {end.code}"


def _signal_name(number: int) -> str:
    if number not in signal.valid_signals() or number >= signal.SIGRTMIN:
        return "unnamed"
    name = signal.Signals(number).name
    return f"{name}, {_FATAL[number]}" if _FATAL.get(number) else name


def extract_traceback(tail: Sequence[str]) -> list[str]:
    """Return the last traceback in `tail` with what follows it and the exceptions it was chained to; [] if none."""
    heads = [index for index, line in enumerate(tail) if _TRACEBACK_HEAD in line or line.startswith(_CRASH_HEAD)]
    if not heads:
        return []
    start = heads.pop()
    while heads and any(line in _CHAIN_LINES for line in tail[heads[-1] : start]):
        start = heads.pop()
    found = [line for line in tail[start:] if not line.startswith(_CRASH_MODULES)]
    while not found[-1]:
        found.pop()
    return found


def evidence(end: RankEnd, launcher_tail: Sequence[str] = (), who: str = "it") -> list[str]:
    """Return the lines that show why: the exception it left, its last traceback, its last words, or mpirun's."""
    whose = "its" if who == "it" else f"{who}'s"
    traceback = end.error.traceback.rstrip("\n").splitlines() if end.error else []
    if traceback := traceback or extract_traceback(end.tail):
        return traceback if who == "it" else [f"{whose} traceback:", *traceback]
    if end.tail:
        return [f"{whose} {LAST_WORDS}", *end.tail[-_STDERR_LINES:]]
    if launcher_tail:
        return [f"{who} {SILENT}; mpirun wrote:", *launcher_tail[-_STDERR_LINES:]]
    return [f"{who} {SILENT}"]


def failures_of_others(cause: RankEnd, ends: Iterable[RankEnd]) -> list[str]:
    """Return one line for each other rank that failed, the first in time first; the rest of many are counted.

    An error that blames no rank may be the reason why an elastic job has not gone on without one that was killed.
    """
    others = sorted((end for end in ends if end.failed and end.rank != cause.rank), key=lambda end: end.at_s)
    lines, told = [], set[tuple[str, str]]()
    for end in others[:_OTHER_RANKS]:
        why = f", lost rank {', '.join(map(str, end.blames))}" if end.blames else ""
        if cause.error is None and end.error and not end.blames and end.error[:2] not in told:
            told.add(end.error[:2])
            why = f", {end.error.exception}: {end.error.message.partition(chr(10))[0]}"
        lines.append(f"rank {end.rank} on host {end.host}: {in_words(end)}{why}")
    if len(others) > _OTHER_RANKS:
        lines.append(f"and {len(others) - _OTHER_RANKS} more")
    return lines


def timeout_report(timeout_s: float, running: Collection[int], absent: Collection[int], size: int) -> str:
    """Return the line that says why the job was ended, and which ranks still ran or had not even started."""
    states = [(f"{was(running)} still running", running), ("had not started", absent)]
    named = [f"{numbered('rank', ranks)} of {size} {state}" for state, ranks in states if ranks]
    return f"ringrun: the job ran longer than --timeout {timeout_s:g} s and was ended; {', '.join(named)}"
