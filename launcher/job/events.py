"""What happens in a job, in the order in which the one thread that decides (supervise.py) hears of it."""

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from ..connection.wire import Report
from ..report.outcome import RankEnd


class Event:
    """One of the following."""


@dataclass(frozen=True)
class Arrived(Event):
    """The agent of `rank` is connected, and has found a free port (0: the one that was asked for is taken)."""

    rank: int
    host: str
    port: int


@dataclass(frozen=True)
class Refused(Event):
    """An agent is connected that this job does not await."""

    reason: str


@dataclass(frozen=True)
class RankDied(Event):
    """A rank has just ended; what it wrote last follows, then RankEnded."""

    rank: int
    code: int


@dataclass(frozen=True)
class RankEnded(Event):
    """A rank has ended, or its agent was lost."""

    end: RankEnd


@dataclass(frozen=True)
class RankNotStarted(Event):
    """The command could not be executed as `rank`."""

    rank: int
    host: str
    reason: str


@dataclass(frozen=True)
class Aborted(Event):
    """MPICH says on the stderr of `rank` that this one has called MPI_Abort."""

    rank: int
    said: str


@dataclass(frozen=True)
class LauncherEnded(Event):
    """mpirun has ended."""


@dataclass(frozen=True)
class Deaf(Event):
    """The connections to the agents are not read any more."""

    reason: str


@dataclass(frozen=True)
class Signalled(Event):
    """ringrun got signal `number`."""

    number: int


@dataclass(frozen=True)
class OutputClosed(Event):
    """Nobody reads ringrun's stdout any more."""


@dataclass(frozen=True)
class Reported(Event):
    """What a rank says of itself, as its agent passes it on."""

    rank: int
    message: Report


@dataclass(frozen=True)
class HostsCame(Event):
    """These hosts, as in h3:2, have come, or have more slots; with them the job would have `size` ranks."""

    hosts: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class StacksWanted(Event):
    """Somebody wants all ranks' stacks; `deliver` takes the lines, in the thread that decides, and must not block."""

    deliver: Callable[[list[str]], None]


Events: TypeAlias = "SimpleQueue[Event]"
