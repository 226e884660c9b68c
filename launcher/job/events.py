"""What happens in a job, in the order in which the one thread that decides (supervise.py) hears of it."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from ..connection.wire import Report
from ..report.outcome import RankEnd


class Arrived(NamedTuple):
    """The agent of `rank` is connected, and rank 0's has a port (0: the one that was asked for cannot be had)."""

    rank: int
    host: str
    port: int


class Refused(NamedTuple):
    """An agent is connected that this job does not await."""

    reason: str


class RankDied(NamedTuple):
    """A rank has just ended; what it wrote last follows, then RankEnded."""

    rank: int
    code: int


class RankEnded(NamedTuple):
    """A rank has ended, or its agent was lost."""

    end: RankEnd


class RankNotStarted(NamedTuple):
    """The command could not be executed as `rank`."""

    rank: int
    host: str
    reason: str


class Aborted(NamedTuple):
    """MPICH says on the stderr of `rank` that this one has called MPI_Abort."""

    rank: int
    said: str


class LauncherEnded(NamedTuple):
    """mpirun has ended."""


class Deaf(NamedTuple):
    """The connections to the agents are not read any more."""

    reason: str


class Signalled(NamedTuple):
    """ringrun got signal `number`."""

    number: int


class OutputClosed(NamedTuple):
    """Nobody reads ringrun's stdout any more."""


class Reported(NamedTuple):
    """What a rank says of itself, as its agent passes it on."""

    rank: int
    message: Report


class HostsCame(NamedTuple):
    """These hosts, as in h3:2, have come, or have more slots; with them the job would have `size` ranks."""

    hosts: tuple[str, ...]
    size: int


class HostLeft(NamedTuple):
    """This host takes part in the job no more, though agents there may still answer; or the part of one `lender`."""

    host: str
    lender: int = -1


class StacksWanted(NamedTuple):
    """Somebody wants all ranks' stacks; `deliver` takes the lines, in the thread that decides, and must not block."""

    deliver: Callable[[list[str]], None]


class TotalsWanted(NamedTuple):
    """Somebody wants what each rank has said last of its steps, a JSON object a line; `deliver` as of StacksWanted.

    Ranks record their steps for `record_s` from now; with 0 they only count them, which takes less time.
    """

    deliver: Callable[[list[str]], None]
    record_s: float


Event: TypeAlias = (
    Arrived
    | Refused
    | RankDied
    | RankEnded
    | RankNotStarted
    | Aborted
    | LauncherEnded
    | Deaf
    | Signalled
    | OutputClosed
    | Reported
    | HostsCame
    | HostLeft
    | StacksWanted
    | TotalsWanted
)
Events: TypeAlias = "SimpleQueue[Event]"
