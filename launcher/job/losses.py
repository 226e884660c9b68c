"""Ranks that are lost in an elastic job: what the others are sent of it, and what the user reads.

membership.py decides; here events go in, and messages to the agents and lines for the user come out.
"""

import math
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..connection.wire import Hosts, Initialized, Left, Meeting, Membership, Reformed, Signal, Suspects, WakeUp
from ..elastic import Elastic
from ..output.display import Output
from ..processes import how_ended
from ..report.card import card
from ..report.outcome import RankEnd, in_words
from ..text import listed, numbered
from .events import Aborted, Event, HostsCame, RankDied, RankEnded, Reported
from .membership import CannotGoOn, Kill, Members, Wake
from .ranks import Agents

TOGETHER_S = 0.05
"""After an agent is lost its host may be, whose others follow: nobody is to re-form with ranks that are just going."""
_WAITED = "it kept others waiting"


class Losses:
    """Those of one job of `size` ranks, spares included."""

    def __init__(
        self,
        size: int,
        elastic: Elastic,
        agents: Agents,
        output: Output,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """note: takes what is said, for the run report."""
        self._note = note
        self._size = size
        self._elastic = elastic
        self._agents = agents
        self._output = output
        self._members = Members(size, elastic)
        self._reports: dict[int, str] = {}  # of the ranks that ringrun has killed: why
        self._lost_at_s: float | None = None
        self._unexplained: set[int] = set()  # dead ranks of which it is not said yet how they have ended
        self._recoveries: list[str] = []  # said after that
        self._gone: list[RankEnded] = []  # agents were lost
        self._gone_due_s = math.inf

    @property
    def due_s(self) -> float:
        """When to call `too_late`."""
        return min(self._members.due_s, self._gone_due_s)

    @property
    def undecided(self) -> bool:
        """Whether there is a loss that is to be decided with those that may follow at once."""
        return bool(self._gone)

    @property
    def idle(self) -> Collection[int]:
        """The spares that still wait for a place: the job ends without them."""
        return self._members.spares

    @property
    def recovered_from(self) -> Collection[int]:
        """The ranks without which the job has gone on; how they have ended does not count any more."""
        return self._members.recovered_from

    def explained(self, end: RankEnd) -> RankEnd:
        """Return `end` with what is known of why; a rank that ringrun has killed has failed."""
        if end.error and self._members.number:
            # the ranks that it blames are numbered as in its own world; those that ended first are the cause
            end = replace(end, error=end.error._replace(lost_ranks=(), culprit=-1))
        if (report := self._reports.get(end.rank)) is None:
            return end
        return replace(end, sent=(), oom=f"ringrun killed it, since {report}")

    def handle(self, event: Event) -> str:
        """Take an event; return why the job cannot go on, nothing where it can."""
        now_s = time.monotonic()
        if isinstance(event, RankEnded) and event.end.code is None:
            self._gone.append(event)
            self._gone_due_s = min(self._gone_due_s, now_s + TOGETHER_S)
            return ""
        return self._act([event], self._decide(event, now_s), now_s)

    def _act(self, events: Sequence[Event], decision: Membership | CannotGoOn | None, now_s: float) -> str:
        self._members.await_rest(now_s)
        if isinstance(decision, CannotGoOn):
            self._say_recoveries()
            return decision.why
        if isinstance(decision, Membership):
            self._agents.broadcast(decision)
        for event in events:
            if not isinstance(event, RankEnded):
                continue
            self._unexplained.discard(event.end.rank)
            if isinstance(decision, Membership) and event.end.code == 0:
                gone = f"rank {event.end.rank} ended with exit code 0 before others did"
                self._say(f"{gone}; continuing {self._with_whom()}")
            if (end := self.explained(event.end)).failed:
                self._note(f"rank {end.rank} was lost ({in_words(end)}); continuing {self._with_whom()}")
                self._output.message(self._card(end, self._with_whom()))
        if not self._unexplained:
            self._say_recoveries()
        return ""

    def report_late(self, end: RankEnd) -> None:
        """Report how a rank has ended whose loss was recovered from, while the job already ends for another reason."""
        if end.failed and end.rank in self.recovered_from:
            self._output.message(self._card(end, "without it, until the job was ended"))

    def announce(self, came: HostsCame) -> None:
        """Tell the ranks of hosts with which a restart would have more ranks than there are now."""
        ranks = len(self._members.ranks) + len(self._members.spares)
        if came.size <= ranks:
            return
        hosts = listed(came.hosts)
        self._agents.broadcast(Hosts(hosts))
        again = f"after its next commit the job starts again, with {came.size} ranks instead of {ranks}"
        self._say(f"{hosts} joined; {again}")

    def too_late(self, now_s: float) -> str:
        """Return why the job cannot go on if ranks have not gone on in time after a loss, else nothing.

        At the end a rank may have work to do alone, which nobody ends; but if it is stopped, its agent has it go on.
        """
        if now_s >= self._gone_due_s:
            gone, self._gone, self._gone_due_s = self._gone, [], math.inf
            hows = {event.end.rank: f"was lost: {event.end.lost}" for event in gone}
            why = self._act(gone, self._lost(hows, now_s), now_s)
            for event in gone if why else ():
                self.report_late(self.explained(event.end))
            return why
        late = self._members.expired(now_s)
        if isinstance(late, Kill):
            self._kill(late, f"{_WAITED}: it did not rejoin them within {self._elastic.stalled_s:g} s of a loss")
        elif isinstance(late, Wake):
            for rank in late.ranks:
                self._agents.send(rank, WakeUp())
        return late.why if isinstance(late, CannotGoOn) else ""

    def _kill(self, decision: Kill, why: str) -> None:
        self._reports |= dict.fromkeys(decision.ranks, why)
        for rank in decision.ranks:
            self._agents.send(rank, Signal(signal.SIGKILL))

    def _decide(self, event: Event, now_s: float) -> Membership | CannotGoOn | None:
        members = self._members
        match event:
            case RankDied(rank, code) if code:
                self._unexplained.add(rank)
                return self._lost({rank: how_ended(code)}, now_s)
            case RankEnded(end) if end.code == 0:
                return members.ended(end.rank, now_s)
            case RankEnded(end) if end.code:  # if it is news
                decision = self._lost({end.rank: how_ended(end.code)}, now_s)
                return decision or (members.blamed(end.rank) if end.blames else None)
            case Reported(_, Initialized()):
                members.initialized()
            case Reported(rank, Suspects(ranks, why)):
                found = members.suspected(rank, ranks)
                if not isinstance(found, Kill):
                    return found
                self._kill(found, f"{_WAITED}: {why}")
            case Aborted(rank, said):
                why = "in an elastic job MPICH itself does not end a rank; to end a rank, use sys.exit()"
                self._kill(Kill(frozenset({rank})), f"it called MPI_Abort: {why}; it said {said!r}")
            case Reported(rank, Meeting(number)):
                members.meets(rank, number, now_s)
                return self._another(now_s)
            case Reported(rank, Left()):
                return members.left(rank, now_s) or self._another(now_s)
            case Reported(rank, Reformed(number)):
                if members.reformed(rank, number):
                    self._report_recovery(now_s)
                return self._another(now_s)
        return None

    def _another(self, now_s: float) -> Membership | None:
        before = set(self._members.ranks)
        if (decision := self._members.another(now_s)) is not None:
            gone = numbered("rank", sorted(before.difference(decision.ranks)))
            self._say(f"{gone} left before others did; continuing {self._with_whom()}")
        return decision

    def _lost(self, hows: dict[int, str], now_s: float) -> Membership | CannotGoOn | None:
        killed = {
            rank: f"was killed, since {self._reports[rank].partition(':')[0]}" for rank in hows.keys() & self._reports
        }
        decision = self._members.lost(hows | killed, now_s)
        if isinstance(decision, Membership) and self._lost_at_s is None:
            self._lost_at_s = now_s
        return decision

    def _report_recovery(self, now_s: float) -> None:
        if self._lost_at_s is not None:
            took_ms = (now_s - self._lost_at_s) * 1000
            self._recoveries.append(f"{numbered('rank', self._members.ranks)} resumed after {took_ms:.0f} ms")
        self._lost_at_s = None

    def _say_recoveries(self) -> None:
        for text in self._recoveries:
            self._say(text)
        self._recoveries.clear()

    def _say(self, text: str) -> None:
        self._output.message([f"ringrun: {text}"])
        self._note(text)

    def _card(self, end: RankEnd, going_on: str) -> list[str]:
        return card(end, (), self._size, going_on=going_on, colour=self._output.colours)

    def _with_whom(self) -> str:
        return f"with {numbered('rank', self._members.ranks)}"
