"""ringrun's side of a simulated job: its Supervisor, what it hears, what it prints, and what it has the agents do."""

from __future__ import annotations

import contextlib
import functools
import queue
import signal
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ringreduce import runtime
from ringreduce.elastic import loop
from ringreduce.monitor import launcher_link
from ringreduce.runtime.recovery import death_notice, elastic_runtime, membership, rendezvous
from ringreduce.transport import in_flight
from ringreduce.transport.message import MessageTransport
from ringrun.connection import wire
from ringrun.elastic import Elastic
from ringrun.job import losses, supervise
from ringrun.job.events import Arrived, HostsCame, Reported
from ringrun.job.plan import Job

from . import properties
from .fakes import CURRENT, Condition, Engine, MpiError, listen
from .network import STALL_S, Fault, Network, Plan
from .rank import Rank

CANNOT = "ringrun: the job cannot continue: "
_jobs: list[SimulatedJob] = []  # the last one runs


class SimulatedJob(Network):
    """One job; `points` are those after all that the plan says where one thing more may happen."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.delays)
        _jobs[:] = [self]
        in_flight._OF_PROCESS.clear()
        self.plan = plan
        self.code: int | None = None
        self.said: list[str] = []  # what ringrun has printed
        self.why = ""  # it cannot go on
        self.still = len(plan.faults) + (plan.arrival is not None)  # what is still to happen of the plan
        # before what a rank is lost, or after what ringrun hears of hosts
        self.points: list[tuple[Rank | None, int]] = []
        self.heard = 0  # events
        self.seen = (-1.0, -1)  # when ringrun heard the last, and what had been sent by then
        self.in_init: set[int] = set()
        self.left = False  # a rank has
        self.lists = {0: wire.Membership(0, tuple(range(plan.np)), {})}  # by number
        self.worked: defaultdict[int, set[int]] = defaultdict(set)  # by list: who says that it works
        self.ranks = [Rank(self, number) for number in range(plan.size)]
        self._events: deque[Any] = deque()
        limits = Elastic(plan.min_np, plan.spares, plan.max_failures, stalled_s=STALL_S)
        fake = SimpleNamespace(
            send=lambda rank, message: self._tell(rank, wire.decode(wire.encode(message))),
            broadcast=self._tell_all,
            set_up=lambda: [self.later(self.delay(), each.notify) for each in self.ranks],
            message=self._print,
            colours=False,
            end_agents=lambda end: None,
            end=lambda steps: None,
            close=lambda: None,
            get=self._next_event,
            tail=[],
            name="mpirun",
            code=0,
        )
        self.supervisor = supervise.Supervisor(Job(plan.size, ["train"], elastic=limits), fake, fake, fake, fake)

    def happens(self) -> None:
        """Something does that is in the plan."""
        self.still -= 1
        self.points.clear()

    def one_more(self, how: str) -> Iterator[Plan]:
        """The plan with another fault, or an arrival ("hosts"), at every point after all that it has."""
        for rank, when in () if self.still else self.points:
            if how == "hosts" and rank is None:
                yield self.plan._replace(arrival=when)
            elif how != "hosts" and rank and not rank.faults:
                yield self.plan._replace(faults=[*self.plan.faults, Fault(rank.number, when, how)])

    def run(self) -> int:
        """Run it to its end; returns ringrun's exit code, or -1 where only stopped ranks are left."""
        for rank in range(self.plan.size):
            self.put(Arrived(rank, "h", 2345))
        self.points.clear()  # hosts that come before all ranks have are no matter of membership
        self.hand_over(self.main)
        waiting = properties.left_alone(self)
        self.is_over = True
        for each in self.ranks:  # their threads end
            if not each.has_ended:
                each.runs = False
                each.turn.release()
                self.main.acquire()
        if self.broken:
            raise self.broken
        if self.code is None:
            healthy = [each.number for each in waiting if not each.stopped]
            assert waiting, "ringrun waits for ever"
            assert not healthy, f"ranks wait for ever: {healthy}"
            return -1  # and nobody is there to miss them
        properties.check_outcome(self)
        return self.code

    def put(self, event: Any) -> None:
        """ringrun hears of something."""
        if isinstance(event, Reported):
            self.left |= isinstance(event.message, wire.Left)
            if not self.why and isinstance(event.message, wire.Reformed):
                self.worked[event.message.number].add(event.rank)
        self._events.append(event)
        self.heard += 1
        self.look()
        if not self.is_over and self.supervisor._shutdown is None and self.seen != (self.now_s, self.sent):
            self.seen = (self.now_s, self.sent)
            self.points.append((None, self.heard))
        if self.heard == self.plan.arrival:
            self.happens()
            self._events.append(HostsCame(("h9",), self.plan.size + 1))
            self.look()

    def look(self) -> None:
        """Let ringrun do what it can do now."""
        self.until_s = self.now_s
        while not self.is_over and self.until_s <= self.now_s:
            if self.supervisor.is_over():
                self.code = self.supervisor.run()
                self.is_over = True
            else:
                self.until_s = self.now_s  # until it waits
                self.supervisor.take_step()

    def _next_event(self, timeout: float) -> Any:
        if self._events:
            return self._events.popleft()
        self.until_s = self.now_s + timeout
        raise queue.Empty

    def _tell(self, rank: int, message: wire.Message) -> None:
        if isinstance(message, wire.Signal) and self.supervisor._shutdown is None and not self.supervisor.is_over():
            properties.check_kill(self.ranks[rank])
        self.send(("down", rank), self.ranks[rank].told, message)

    def _tell_all(self, message: wire.Message) -> None:
        if isinstance(message, wire.Membership):
            self.lists[message.number] = message
            properties.check_list(self, message)
        same = wire.decode(wire.encode(message))
        for each in self.ranks:
            self._tell(each.number, same)

    def _print(self, lines: Sequence[str]) -> None:
        self.said += lines
        if lines[0].startswith(CANNOT):
            self.why = lines[0].removeprefix(CANNOT)
            properties.check_decision_to_end(self)


def _now_s() -> float:
    return _jobs[-1].now_s


def _exit(code: int) -> None:
    raise SystemExit(code)


def _sleep(seconds: float) -> None:
    CURRENT.rank.wait(max(seconds, 1.0))  # whatever it looks for between its sleeps wakes it earlier


@contextlib.contextmanager
def simulation() -> Iterator[None]:
    """Let jobs be simulated in it."""
    clock = SimpleNamespace(monotonic=_now_s, sleep=_sleep, time=_now_s, perf_counter=_now_s)
    world = SimpleNamespace(Get_attr=lambda _: 1 << 30)
    mpi = SimpleNamespace(COMM_WORLD=world, TAG_UB=0, Exception=MpiError, Status=object)
    system = SimpleNamespace(sched_yield=lambda: _sleep(1.0), _exit=_exit)
    of_members = {"time": clock, "os": system, "threading": SimpleNamespace(Condition=Condition), "print": mock.Mock()}
    replaced = [
        *((module, {"time": clock}) for module in (loop, elastic_runtime, losses, supervise)),
        (rendezvous, {"time": clock, "os": system}),
        (membership, of_members),
        (elastic_runtime, {"StatusServer": listen, "outlive_daemon": lambda: None}),
        (death_notice, {"give": lambda error_file: None}),
        (launcher_link, {"report": lambda error_file, **message: CURRENT.rank.say(message)}),
        (runtime, {"Engine": Engine}),
        (MessageTransport, {"_mpi": mpi}),
        (signal, {"valid_signals": functools.cache(signal.valid_signals)}),  # quicker
    ]
    with contextlib.ExitStack() as stack:
        for where, by_name in replaced:
            stack.enter_context(mock.patch.multiple(where, create=True, **by_name))
        yield
