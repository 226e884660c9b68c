"""Elastic jobs, whose ranks go on without those that fail: their flags, and the variables of their ranks."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .arguments import Add, parse_seconds, parse_times, whole
from .errors import UsageError
from .text import counted

RECOVERY_LIMIT_S = 20.0
"""How long re-forming may take, beside the time after which a rank that keeps others waiting is killed."""

STALL_ABORT_S = 30.0
"""After this time a rank that keeps others waiting counts as lost, unless the user says another."""

LONGEST_COOLDOWN_S = 3000.0
"""No host is left out for longer: commits that lie for an hour are removed (agent/kept_commits.py)."""

_STALL_ABORT, _HOROVODS = "RINGREDUCE_STALL_ABORT_S", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_NO_FINALIZE = "MPI4PY_RC_FINALIZE"
"""Whether mpi4py, where it started MPI before ringreduce did, ends it at exit; that would wait for lost ranks."""
_MOST = 999_999
_HOROVODS_SWITCHES = ("min_np", "host_discovery_script")
"""Flags with which a job is elastic, also without --elastic, as in horovodrun."""
_DEPENDENT = ("max_np", "spares", "max_failures", "blacklist_cooldown_range")


@dataclass(frozen=True)
class Elastic:
    """What was asked for."""

    min_np: int = 1
    """With fewer ranks the job does not go on."""
    spares: int = 0
    """How many ranks, the last ones, wait to take the place of others."""
    max_failures: int | None = None
    """With more lost ranks the job does not go on."""
    max_np: int | None = None
    """How many ranks, spares not counted, it may have where hosts come; None: as many as at first."""
    cooldown_s: tuple[float, float] | None = None
    """A host that fails is left out of restarts for the first time, and when it fails again longer, up to the last."""
    stalled_s: float = STALL_ABORT_S
    """After this time a rank for which others wait in re-forming counts as lost."""
    takes_hosts: bool = False
    """Hosts that come while it runs are taken, also without --restarts."""

    @property
    def recovery_s(self) -> float:
        """How long ranks may take to go on after a loss."""
        return RECOVERY_LIMIT_S + self.stalled_s


def add_flags(add: Add) -> None:
    """Add the flags of elastic jobs."""
    add("--elastic", action="store_true", help="continue without ranks that fail")
    least = "the same; at least N ranks must be left (1; without --elastic: -np)"
    add("--min-np", "--min-num-proc", metavar="N", help=least)
    add("--max-np", "--max-num-proc", metavar="N", help="when hosts are added, grow to at most N ranks")
    add("--spares", metavar="N", help="start N extra ranks, which replace those that fail (0)")
    add("--max-failures", metavar="N", help="end the job when more than N ranks have failed (no limit)")
    cooldown = "keep a failed host out of restarts for MIN to MAX seconds"
    add("--blacklist-cooldown-range", nargs=2, metavar=("MIN", "MAX"), help=cooldown)


def parse(options: argparse.Namespace, flag: Callable[[str], str], environ: Mapping[str, str]) -> Elastic | None:
    """Return what the flags say; None for a job that is not elastic. Raises UsageError.

    flag:    how a message about one of them begins
    environ: what the ranks get, the user's settings included
    """
    switch = next((name for name in ("elastic", *_HOROVODS_SWITCHES) if getattr(options, name)), None)
    if switch is None:
        if given := next((name for name in _DEPENDENT if getattr(options, name) is not None), None):
            raise UsageError(f"{flag(given)} is for an elastic job; add --elastic")
        return None
    if options.launcher == "srun":
        raise UsageError(f"{flag(switch)}: srun ends the job when a rank is lost; leave --launcher srun out")
    spares = 0 if options.spares is None else parse_times(options.spares, flag("spares"))
    default = "1" if options.elastic or options.np == "auto" else options.np  # horovodrun's is -np
    return Elastic(
        whole(options.min_np or default, flag("min_np"), 1, _MOST),
        spares,
        None if options.max_failures is None else parse_times(options.max_failures, flag("max_failures")),
        None if options.max_np is None else whole(options.max_np, flag("max_np"), 1, _MOST),
        _cooldown_s(options.blacklist_cooldown_range, flag("blacklist_cooldown_range")),
        _stall_abort_s(environ) or STALL_ABORT_S,
        options.max_np is not None or options.host_discovery_script is not None,
    )


def _cooldown_s(given: str | Sequence[str] | None, flag: str) -> tuple[float, float] | None:
    """Return the two times; in a file they are one text."""
    words = given.split() if isinstance(given, str) else given
    if words is None:
        return None
    if len(words) != 2:
        raise UsageError(f"{flag}: expected two numbers of seconds, as in 10 100, got {' '.join(words)!r}")
    least_s, most_s = (parse_seconds(word, flag) for word in words)
    if most_s < least_s:
        raise UsageError(f"{flag}: expected the longer time last, got {least_s:g} {most_s:g}")
    if most_s > LONGEST_COOLDOWN_S:
        raise UsageError(f"{flag}: expected at most {LONGEST_COOLDOWN_S:g} s, got {most_s:g}")
    return least_s, most_s


def _stall_abort_s(environ: Mapping[str, str]) -> float | None:
    """Return after how many seconds the user wants stalled ranks to count as lost; what is no number init() refuses."""
    try:
        return float(environ[next(name for name in (_STALL_ABORT, _HOROVODS) if name in environ)])
    except (StopIteration, ValueError):
        return None


def most_ranks(elastic: Elastic | None, np: int | None) -> int | None:
    """Return how many ranks a job may have, spares included, for which `np` were asked; None: as many as slots."""
    return elastic.max_np + elastic.spares if elastic and elastic.max_np else np


def with_size(elastic: Elastic, np: int, size: int) -> Elastic:
    """Return what holds for `size` ranks where `np`, and the spares, were asked for: there may be fewer spares."""
    return replace(elastic, spares=max(0, min(elastic.spares, size - np)))


def check_size(elastic: Elastic, size: int) -> None:
    """Raise UsageError if so many ranks, spares included, are too few."""
    if (np := size - elastic.spares) < elastic.min_np:
        spares = f", plus {counted(elastic.spares, 'spare')}" if elastic.spares else ""
        raise UsageError(
            f"--min-np {elastic.min_np}: the job would start with {np} ranks{spares}; raise -np, or lower --min-np"
        )
    if elastic.max_np is not None and np > elastic.max_np:
        raise UsageError(
            f"--max-np {elastic.max_np}: the job would start with {np} ranks; lower -np, or raise --max-np"
        )


def rank_variables(elastic: Elastic, of_engine: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the ranks, and not for mpirun; those that the user has set in `environ` are left alone.

    of_engine: the MPI's own.
    """
    wanted = {**of_engine, _NO_FINALIZE: "0"}
    if _HOROVODS not in environ:
        wanted[_STALL_ABORT] = f"{STALL_ABORT_S:g}"
    ours = {"ELASTIC": 1, "MIN_NP": elastic.min_np, "SPARES": elastic.spares}
    return {name: value for name, value in wanted.items() if name not in environ} | {
        f"RINGREDUCE_{name}": str(value) for name, value in ours.items()
    }
