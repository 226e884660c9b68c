"""What happens in a job, in the order in which the one thread that decides (supervise.py) hears of it."""

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from ..connection.wire import State
from ..report.outcome import RankEnd


@dataclass(frozen=True)
class Arrived:
    """The agent of `rank` is connected, and has found a free port (0: the one that was asked for is taken)."""

    rank: int
    host: str
    port: int


@dataclass(frozen=True)
class Refused:
    """An agent is connected that this job does not await."""

    reason: str


@dataclass(frozen=True)
class RankEnded:
    """A rank has ended, or its agent was lost."""

    end: RankEnd


@dataclass(frozen=True)
class RankNotStarted:
    """The command could not be executed as `rank`."""

    rank: int
    host: str
    reason: str


@dataclass(frozen=True)
class LauncherEnded:
    """mpirun has ended."""


@dataclass(frozen=True)
class Signalled:
    """ringrun got signal `number`."""

    number: int


@dataclass(frozen=True)
class OutputClosed:
    """Nobody reads ringrun's stdout any more."""


@dataclass(frozen=True)
class RankState:
    """A rank's answer to a question."""

    rank: int
    state: State


@dataclass(frozen=True)
class RankStalled:
    """ringreduce in a rank reports a stall."""

    rank: int
    report: str


@dataclass(frozen=True)
class RankInInit:
    """A rank waits in ringreduce.init(); worth a report after `report_after_s`."""

    rank: int
    report_after_s: float


@dataclass(frozen=True)
class RankInitialized:
    """ringreduce.init() has returned in a rank."""

    rank: int


@dataclass(frozen=True)
class StacksWanted:
    """Somebody wants all ranks' stacks; `deliver` takes the lines, in the thread that decides, and must not block."""

    deliver: Callable[[list[str]], None]


Event: TypeAlias = (
    Arrived
    | Refused
    | RankEnded
    | RankNotStarted
    | LauncherEnded
    | Signalled
    | OutputClosed
    | RankState
    | RankStalled
    | RankInInit
    | RankInitialized
    | StacksWanted
)
Events: TypeAlias = "SimpleQueue[Event]"
