"""What the run report is made of: what ranks measure of their steps, and what happens to the job, in bounded memory.

ringreduce in a rank (ringreduce/execution/steps.py) sends three kinds of JSON objects:

    {"about": …}    who it is, its clock, versions, settings, links: once for each world
    {"totals": …}   sums and histograms since its first step, each second
    {"step": …}     one of its last steps, with all operations and waits: once a minute, and at its end

Of a rank the newest is kept, and totals of up to two minutes before, so that a report shows what is slow now. Ranks are
numbered as in the job's first world. What came in a job of a week is merged until MOST_BINS are left.
"""

import json
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..report.outcome import RankEnd, in_words

MOST_BINS = 500
MOST_STEPS = 64
_MOST_EVENTS = 200  # of each kind; of more the newest are kept
_MARK_S = 60.0

Said = dict[str, Any]
"""What a rank has sent; docs/run-report.md has its fields."""


@dataclass
class Rank:
    """One rank of the attempt that runs."""

    steps: deque[Said]
    about: Said = field(default_factory=dict)
    totals: Said = field(default_factory=dict)
    """The newest."""
    marks: deque[Said] = field(default_factory=lambda: deque(maxlen=2))
    """Totals of about one and two minutes before."""
    heard_s: float = 0.0
    """When they came."""
    end: RankEnd | None = None
    is_gone: bool = False
    """The others go on without it in a world of theirs, whose steps and ranks have other numbers than its own."""

    @property
    def host(self) -> str:
        """Its name, as far as that is known."""
        return str(self.about.get("host") or (self.end.host if self.end else ""))

    def recent(self, name: str) -> float:
        """Return how much the total `name` has grown in the last one or two minutes."""
        return float(self.totals.get(name) or 0) - float(self._before.get(name) or 0)

    def recent_each(self, name: str) -> dict[str, float]:
        """Return how much each of the totals `name` has grown."""
        before = self._before.get(name) or {}
        return {key: value - before.get(key, 0) for key, value in (self.totals.get(name) or {}).items()}

    def core_wait_s(self, step_s: float) -> float:
        """Return how long another thread had its core in a step of `step_s`, by the share of the time of all steps.

        These include what a usual step has not, such as an evaluation, in which it waits for its core, too.
        """
        return step_s * min(1.0, self.recent("core_wait_s") / max(1e-9, self.recent("step_s")))

    @property
    def _before(self) -> Said:
        """The totals that the newest are compared with: none, if there are no others."""
        return self.marks[0] if self.marks and self.marks[0] is not self.totals else {}


@dataclass
class Bin:
    """Some seconds of the job: its steps by their time, see `seconds_of`, and the most memory of any rank."""

    steps: Counter[int] = field(default_factory=Counter)
    rss: int = 0
    shm: int = 0

    def add(self, other: "Bin") -> None:
        """Add what has happened in `other`."""
        self.steps.update(other.steps)
        self.rss, self.shm = max(self.rss, other.rss), max(self.shm, other.shm)


def seconds_of(index: int) -> float:
    """Return the time in the middle of a step's class in ranks' histograms; classes are 5 % wide."""
    return math.pow(1.05, index + 0.5)


class Bins:
    """At most MOST_BINS, of equal width, which doubles when there are more."""

    def __init__(self) -> None:
        self.width_s = 1.0
        self.by_number: dict[int, Bin] = {}

    def add(self, at_s: float, new: Bin) -> None:
        """Add what has happened until `at_s`."""
        self.by_number.setdefault(math.floor(at_s / self.width_s), Bin()).add(new)
        if len(self.by_number) > MOST_BINS:
            before, self.by_number, self.width_s = self.by_number, {}, 2 * self.width_s
            for number, each in before.items():
                self.by_number.setdefault(number // 2, Bin()).add(each)


@dataclass(frozen=True)
class Event:
    """What has happened `at_s` seconds after the start; `rank` where it is of one."""

    at_s: float
    text: str
    rank: int = -1


Kind = Literal["failures", "stalls", "elastic", "findings"]
"""`elastic`: losses, recoveries and restarts; `findings`: of --check."""


class Collector:
    """All of one job, over its restarts. Other threads may look at it, holding `lock`."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.command = list(command)
        self.started_s = time.time()
        self._began_s = time.monotonic()
        self.lock = threading.Lock()
        self.size = 0
        self.ranks: dict[int, Rank] = {}
        self.bins = Bins()
        self.events: dict[Kind, deque[Event]] = {kind: deque(maxlen=_MOST_EVENTS) for kind in get_args(Kind)}
        self.card: list[str] = []
        self.exit_code: int | None = None
        """Of ringrun, when the job is over."""

    @property
    def age_s(self) -> float:
        """How long the job has run."""
        return time.monotonic() - self._began_s

    def begin(self, size: int) -> None:
        """Begin an attempt with `size` ranks."""
        with self.lock:
            self.size = size
            self.ranks = {}

    def measured(self, origin: int, text: str) -> None:
        """Take a message of the rank that had this number in its first world; one that makes no sense is dropped."""
        try:
            said: dict[str, Said] = json.loads(text)
            ((kind, what),) = said.items()
            with self.lock:
                self._take(self._rank(origin), kind, what)
        except (ValueError, TypeError, AttributeError, KeyError):
            return

    def _rank(self, origin: int) -> Rank:
        most = min(MOST_STEPS, max(4, 1024 // max(1, self.size)))
        return self.ranks.setdefault(origin, Rank(deque(maxlen=most)))

    def _take(self, rank: Rank, kind: str, what: Said) -> None:
        if kind == "about":
            if rank.about:
                for each in self.ranks.values():
                    each.is_gone |= each.end is not None and each is not rank
            rank.about, rank.totals = what, {}
            rank.steps.clear()  # of another world
            rank.marks.clear()
        elif kind == "step":
            rank.steps.append(what)
        elif kind == "totals":
            self._take_totals(rank, what)

    def _take_totals(self, rank: Rank, new: Said) -> None:
        at_s, before = float(new["at_s"]), rank.totals.get("histogram") or {}
        steps = {int(index): n - before.get(index, 0) for index, n in new["histogram"].items()}
        if rank.about.get("rank") != 0:  # whose steps are all ranks'
            steps = {}
        ended = +Counter(steps)  # without zeros: the page draws no time where no step has ended
        self.bins.add(self.age_s, Bin(ended, new.get("rss") or 0, new.get("shm") or 0))
        if (new.get("samples") or 0) < (rank.totals.get("samples") or 0):
            rank.marks.clear()  # with its first step, or with another thread that trains, it has begun to sample anew
        if not rank.marks or at_s - rank.marks[-1]["at_s"] >= _MARK_S:
            rank.marks.append(new)
        rank.totals, rank.heard_s = new, time.monotonic()

    def latest(self) -> list[Said]:
        """Return the newest totals of each rank that runs, with its `rank`, `host`, and `age_s` since they came."""
        now_s = time.monotonic()
        with self.lock:
            return [
                {**each.totals, "rank": rank, "host": each.about.get("host", ""), "age_s": now_s - each.heard_s}
                for rank, each in sorted(self.ranks.items())
                if each.totals and each.end is None
            ]

    def ended(self, end: RankEnd) -> None:
        """A rank has ended."""
        with self.lock:
            self._rank(end.rank).end = end
        if end.failed:
            raised = f": {end.error.exception}: {end.error.message}" if end.error else ""
            self.note("failures", in_words(end) + raised, end.rank)

    def note(self, kind: Kind, text: str, rank: int = -1) -> None:
        """Take a line that the user is to read, of `rank` if it is of one."""
        with self.lock:
            self.events[kind].append(Event(self.age_s, text, rank))
