"""An elastic job in virtual time: ringrun's decisions and its ranks' as they are, over a network and faults of ours.

    job = SimulatedJob(Plan(np=3, faults=[Fault(rank=1, when=4, how="kill")]))
    job.run()          # ringrun's exit code; Violation where a property does not hold
    job.named          # whose failures it has reported

Real: ringrun's Supervisor with all that it decides by, what goes over the wire, what a rank hears and says, re-forming
(survivors.py, worlds.py, reform.py), elastic.run, and the end of a rank. Simulated: processes, agents, MPI's messages
and the clock; and an engine whose one operation exchanges a value with all ranks of the world.

One thread runs at a time: each rank is one, and whoever waits looks for what happens next. Equal plans give equal runs.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import json
import math
import queue
import re
import signal
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy as np

import ringreduce.membership
from ringreduce import elastic, reform, runtime
from ringreduce.errors import PeerLostError
from ringreduce.execution.host import Host
from ringreduce.monitor import launcher_link
from ringreduce.settings import Settings
from ringreduce.startup import survivors, worlds
from ringreduce.transport import in_flight
from ringreduce.transport.message import MessageTransport
from ringreduce.world import World
from ringrun.agent.rank_socket import _report
from ringrun.connection import wire
from ringrun.elastic import Elastic
from ringrun.job import losses, supervise
from ringrun.job.events import Arrived, HostsCame, RankDied, RankEnded, Reported
from ringrun.job.plan import Job
from ringrun.report.outcome import RankEnd

STEPS = 2  # of the training
TICK_S = 1e-3  # how long a message takes
STALL_S = 30.0
LONGEST_S = 400.0  # of virtual time
FAILS = {"kill": -9, "exit0": 0, "exit7": 7, "raise": 1, "blame": 1}
"""How a rank may end by itself, and its exit code."""
HANGS = ("stop",)
CUTS = ("agent", "cut", "host")
"""Its agent is gone; the agent's link is, so that the rank ends a little later; all agents of its host are."""


FATAL = {*FAILS, "killed", *CUTS}
SOON = 30  # ticks: messages that are not later than others by more come together
CANNOT = "ringrun: the job cannot go on: "


class Fault(NamedTuple):
    """What happens to a rank when it does something for the `when`th time."""

    rank: int
    when: int
    how: str


class Plan(NamedTuple):
    """A job, and what happens to it."""

    np: int = 3
    spares: int = 0
    faults: Sequence[Fault] = ()
    arrival: int | None = None  # after so many events hosts come
    hosts: Sequence[int] = ()  # by rank; by default one
    min_np: int = 1
    max_failures: int | None = None
    delays: Sequence[int] = ()  # of messages, in the order in which they are sent, in ticks; then 0
    step_s: float = 0.0  # how long all ranks compute in each step
    report_s: float = 5 * TICK_S  # from a death to the report of what the rank wrote

    @property
    def size(self) -> int:
        """How many ranks are started."""
        return self.np + self.spares


class Violation(AssertionError):
    """A property does not hold."""


class _Gone(BaseException):
    """This rank's process is no more."""


class _Expelled(BaseException):
    """Of a rank that hears that it counts as lost."""


class _Routine(threading.Thread):
    """A thread that runs only when another hands over; used again by the next job."""

    _idle: ClassVar[list[_Routine]] = []

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.turn = threading.Lock()
        self.turn.acquire()
        self.program: Callable[[], Any] = lambda: None
        self.start()

    @classmethod
    def of(cls, program: Callable[[], _Routine | None]) -> _Routine:
        """One that runs `program`, which returns to whom it hands over at its end."""
        found = cls._idle.pop() if cls._idle else cls()
        found.program = program
        return found

    def run(self) -> None:
        while True:
            self.turn.acquire()
            after = self.program()
            self._idle.append(self)
            after.turn.release()


class _Main:
    """The thread that began the job."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()


class Rank:
    """A rank's process, and its agent."""

    def __init__(self, job: SimulatedJob, number: int) -> None:
        self.job, self.number = job, number
        self.faults = {each.when: each.how for each in job.plan.faults if each.rank == number}
        self.actions = 0  # what it has done
        self.points: list[int] = []  # before which of them it may be lost; before others it is the same
        self.seen = (-1, -1)  # what had happened before the last
        self.busy_at = 0  # before which of them it is in the middle of its first step
        self.runs, self.stopped, self.has_agent = True, False, True
        self.cause = ""  # the fault that it has suffered
        self.failure: BaseException | None = None  # to be raised in it
        self.killed_by: list[int] = []  # signals of ringrun's
        self.members: ringreduce.membership.Members | None = None
        self.kept: dict[type, dict[str, Any]] = {}  # what its agent has kept for it
        self.mail: defaultdict[Any, dict[int, Any]] = defaultdict(dict)  # of its engine
        self.left: set[int] = set()  # ranks that have left their world in order
        self.receives: defaultdict[Any, deque[_Request]] = defaultdict(deque)
        self.arrived: defaultdict[Any, deque[bytes]] = defaultdict(deque)
        self.has_state = number < job.plan.np
        self.finished: tuple[int, list[Any]] | None = None
        self.error: wire.RankError | None = None
        self.wake = 0  # which wait is to end
        self.routine = _Routine.of(self._run)

    # What the rank does

    def _run(self) -> Any:
        try:
            _current.rank = self
            with contextlib.suppress(_Gone):
                self._live()
        except BaseException as error:
            self.job.broken = self.job.broken or error
        self.routine_ended = True
        return self.job.next_turn()

    def _live(self) -> None:
        try:
            self._program()
            code = 0
        except (_Gone, Violation):
            raise
        except Exception as error:
            lost = tuple(error.lost_ranks) if isinstance(error, PeerLostError) else ()
            self.error = wire.RankError(type(error).__name__, str(error), "", lost)
            if str(error).startswith("only spares are left"):
                self.cause = "raise"
                self.job.check(not any(each.finished for each in self.job.ranks), f"rank {self.number} is left alone")
            elif not self.cause:
                raise Violation(f"rank {self.number} fails: {error!r}") from error
            code = 1
        self.end(code)

    def _program(self) -> None:
        job, plan = self.job, self.job.plan
        settings = Settings(
            elastic=True, spares=plan.spares, error_file=str(self.number), stall_abort_s=STALL_S, stall_check_s=0.0
        )
        hosts = tuple(plan.hosts) or (0,) * plan.size
        comm = _Comm(self)
        whole = World(self.number, plan.size, hosts, comm, comm, comm, origins=tuple(range(plan.size)))
        self._await_init()
        transport = MessageTransport(whole)
        host = Host(whole, transport, settings, cores=1)
        elastic_job, entered = worlds.begin(worlds.Entered(whole, transport, host, [0.0] * plan.size, ()))
        made = runtime.Runtime(*entered[:2], settings, *entered[2:], elastic=elastic_job)
        with runtime.bound(made):
            train = elastic.run(_train)
            train(_State(self))
            self.finished = made.world.number, job.history_of(self)
            if isinstance(self.failure, PeerLostError) and not self.cause:
                self.cause = "blame"
                raise self.failure
        runtime._leave_elastic(made, elastic_job, "its script ended")

    def _await_init(self) -> None:
        """Wait until all ranks call it, for ever if one does not; all go on together."""
        self.act()
        self.job.in_init.add(self.number)
        if len(self.job.in_init) == self.job.plan.size:
            for each in self.job.ranks:
                each.notify()
        while len(self.job.in_init) < self.job.plan.size:
            self.wait()

    def act(self) -> None:
        """Whatever a rank does passes here: a fault may come before it."""
        if not self.runs:
            raise _Gone
        self.actions += 1
        if self.seen != (seen := (len(self.job.trace), self.job.turns)):
            self.seen = seen
            self.points.append(self.actions)
        if how := self.faults.get(self.actions):
            self.suffer(how)
        if not self.runs:
            raise _Gone
        if self.stopped:
            self._await_turn()

    def wait(self, timeout_s: float = math.inf) -> None:
        """Let others run until something has happened to this rank, or the time is over."""
        self.act()
        self.wake += 1
        if timeout_s < math.inf:
            self.job.later(timeout_s, self._wake_up, self.wake)
        self._await_turn()

    def compute(self, seconds: float) -> None:
        """Be busy, and hear nothing."""
        for until_s in (self.job.now_s + seconds / 2, self.job.now_s + seconds) if seconds else ():
            while self.job.now_s < until_s:
                self.wait(until_s - self.job.now_s)
            self.busy_at = self.busy_at or self.actions + 1

    def _await_turn(self) -> None:
        self.job.hand_over(self)
        if not self.runs:
            raise _Gone

    def _wake_up(self, wake: int) -> None:
        if wake == self.wake:
            self.notify()

    def notify(self) -> None:
        """Something has happened to it."""
        if not self.stopped and self not in self.job.ready:
            self.job.ready.append(self)

    def exchange(self, world: World, name: Any, value: Any, check: Callable[[], None]) -> list[Any]:
        """Everybody's value, by rank of the world; `check` may raise."""
        key, origins = (world.number, name), world.origins
        for each in origins:
            if each != self.number:
                self.act()
                self.job.send(("mpi", self.number, each), self.job.ranks[each].collect, key, self.number, value)
        self.mail[key][self.number] = value
        waits_s = self.job.now_s
        while len(self.mail[key]) < len(origins):
            check()
            if set(self.left) & set(origins) - self.mail[key].keys():
                raise PeerLostError("it has left", [origins.index(min(self.left & set(origins)))])
            if self.job.now_s > waits_s + STALL_S:
                missing = [each for each in origins if each not in self.mail[key]]
                mute = [each for each in missing if self.job.ranks[each].stopped or not self.job.ranks[each].runs]
                if mute or world.rank == 0:
                    launcher_link.report_suspects(str(self.number), mute or missing, "it waits")
                waits_s = self.job.now_s
            self.wait(STALL_S + 1)
        check()
        return [self.mail[key][each] for each in origins]

    def collect(self, key: Any, source: int, value: Any) -> None:
        """Another rank's value has arrived."""
        if self.runs:
            self.mail[key][source] = value
            self.notify()

    # What happens to it

    def suffer(self, how: str) -> None:
        """A fault."""
        job = self.job
        if how in ("exit0", "stop") and self.number not in job.in_init:
            return  # what ends or hangs before init() returns is no matter of membership
        if self.cause:
            return
        job.happens()
        if how == "raise":
            self.failure = ValueError("on purpose")
            return
        if how == "blame":
            if self.members and (dead := self.members.newest.dead):
                self.failure = PeerLostError("of an operation of a world before", sorted(dead))
            return
        self.cause = how
        if how == "stop":
            self.stopped = True
        elif how == "host":
            hosts = tuple(job.plan.hosts) or (0,) * job.plan.size
            for each in job.ranks:
                if hosts[each.number] == hosts[self.number] and each.has_agent and each.runs:
                    each.cause = how
                    each.cut()
                    each.vanish()
        elif how == "agent":
            self.cut()
            self.vanish()
        elif how == "cut":
            self.cut()
            job.later(job.delay() * 10, self.vanish)
        else:
            self.end(FAILS[how])

    def cut(self) -> None:
        """Its agent is lost."""
        if self.has_agent and self.runs:
            self.has_agent = False
            self.job.died_s.setdefault(self.number, self.job.now_s)
            end = RankEnd(self.number, "h", 1, None, 0.0)
            self.job.send(("agent", self.number), self.job.put, RankEnded(end))

    def end(self, code: int, at_once: bool = True) -> None:
        """Its process has ended."""
        if not self.runs:
            return
        self.vanish()
        if not self.has_agent:
            return
        link, job = ("agent", self.number), self.job
        job.send(link, job.put, RankDied(self.number, code))
        end = RankEnd(self.number, "h", 1, code, job.now_s, tuple(self.killed_by), self.error)
        job.send(link, job.put, RankEnded(end), extra_s=job.plan.report_s)

    def vanish(self) -> None:
        """The process is gone."""
        self.runs = self.stopped = False
        self.job.died_s.setdefault(self.number, self.job.now_s)
        for each in self.job.ranks:  # MPI hears of it, some time
            self.job.later(self.job.delay() * 3, each.notify)

    # What its agent does

    def say(self, message: dict[str, Any]) -> bool:
        """The rank says something to its agent, which passes it on."""
        self.act()
        if not self.has_agent:
            return True
        report = _report(json.loads(json.dumps(message)))
        assert report is not None
        received = wire.decode(wire.encode(report))
        self.job.send(("agent", self.number), self.job.put, Reported(self.number, received))
        if isinstance(report, wire.Initialized):
            for kept in self.kept.values():
                self.job.send(("ask", self.number), self.hear, kept)
        return True

    def told(self, message: wire.Message) -> None:
        """Its agent hears something of ringrun's."""
        if not self.has_agent:
            return
        if isinstance(message, wire.Signal):
            self.killed_by.append(message.number)
            if message.number == signal.SIGKILL or not self.stopped:
                self.end(-message.number)
        elif isinstance(message, wire.WakeUp):
            if self.stopped:
                self.stopped = False
                self.cause = "woken"
                self.notify()
                self.job.send(("ask", self.number), self.hear, None)
        elif isinstance(message, wire.Membership | wire.Hosts):
            fields = message._asdict()
            self.kept[type(message)] = {"membership": fields} if isinstance(message, wire.Membership) else fields
            self.job.send(("ask", self.number), self.hear, self.kept[type(message)])

    def hear(self, said: dict[str, Any] | None) -> None:
        """The rank's thread that listens hears something."""
        if self.members is None or not self.runs:
            return
        if self.stopped:
            self.job.later(1.0, self.hear, said)
            return
        if said is not None:
            try:
                self.members.hear(json.loads(json.dumps(said)))
            except _Expelled:
                self.job.expelled(self)
                self.end(ringreduce.membership.EXPELLED_EXIT_CODE)
        self.notify()


class _Request:
    """A message of MPI's."""

    def __init__(self, rank: Rank, peer: int, memory: Any = None) -> None:
        self.rank, self.peer, self.memory, self.is_done = rank, peer, memory, memory is None

    def Test(self) -> bool:
        if not self.is_done and not self.rank.job.ranks[self.peer].runs and self.rank.job.has_mpi_heard(self.peer):
            raise _MpiError(f"rank {self.peer} has failed")
        return self.is_done

    def Cancel(self) -> None:
        self.is_done = True


class _MpiError(Exception):
    """MPI's."""


class _Comm:
    """MPI's communicator of all ranks, in one of them."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def Isend(self, memory: Any, to: int, tag: int) -> _Request:
        rank, there = self._rank, self._rank.job.ranks[to]
        rank.act()
        rank.job.send(("mpi", rank.number, to), self._deliver, there, (rank.number, tag), bytes(memory))
        return _Request(rank, to)

    def Irecv(self, memory: Any, source: int, tag: int) -> _Request:
        rank, key = self._rank, (source, tag)
        rank.act()
        request = _Request(rank, source, memory)
        if rank.arrived[key]:
            self._fill(request, rank.arrived[key].popleft())
        else:
            rank.receives[key].append(request)
        return request

    def _deliver(self, there: Rank, key: Any, content: bytes) -> None:
        while there.receives[key]:
            request = there.receives[key].popleft()
            if not request.is_done:
                self._fill(request, content)
                there.notify()
                return
        there.arrived[key].append(content)

    @staticmethod
    def _fill(request: _Request, content: bytes) -> None:
        np.asarray(request.memory)[: len(content)] = np.frombuffer(content, np.uint8)
        request.is_done = True

    def Ack_failed(self) -> None:
        pass


class _Engine:
    """What re-forming and elastic.run ask of an engine."""

    def __init__(self, world: World, *_: Any) -> None:
        self.world, self.rank = world, _current.rank
        self.negotiation = SimpleNamespace(error=None)
        self.gpu = SimpleNamespace(queued=tuple, close=lambda: None, free=lambda **_: None, default_index=0)
        self.process_sets = SimpleNamespace(numbered=list)
        self.activity = SimpleNamespace(waiting_for=str)

    def give_up(self, error: Exception) -> None:
        self.negotiation.error = self.negotiation.error or error
        self.rank.notify()

    def join(self) -> None:
        pass

    def exchange(self, name: Any, value: Any) -> list[Any]:
        """See `Rank.exchange`."""
        if isinstance(self.rank.failure, ValueError) and not self.rank.cause:  # the script's
            self.rank.cause = "raise"
            raise self.rank.failure
        return self.rank.exchange(self.world, name, value, self._check)

    def _check(self) -> None:
        if self.negotiation.error:
            raise self.negotiation.error

    def leave(self, why: str, interrupted: Callable[[], bool] = lambda: False) -> bool:
        rank, others = self.rank, set(self.world.origins) - {self.rank.number}
        for each in sorted(others):
            rank.act()
            rank.job.send(("mpi", rank.number, each), rank.job.leaves, rank.job.ranks[each], rank.number)
        while not (others <= rank.left or self.negotiation.error):
            if interrupted():
                return False
            rank.wait(0.5)
        return self.negotiation.error is None


class _State(elastic.State):
    """The steps that count, and who took part in each."""

    commits = 0

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.owner = rank
        self.history: list[Any] = []
        self.saved: list[Any] = []
        rank.state = self

    def save(self) -> None:
        self.saved, self.commits = list(self.history), self.commits + 1

    def restore(self) -> None:
        self.history = list(self.saved)

    def sync(self) -> None:
        latest, engine = reform.latest(), runtime.current("sync").engine
        root = latest.root if latest else 0
        origin = engine.world.origins[root]
        has_state = self.owner.job.ranks[origin].has_state
        found = engine.exchange("sync", (self.history, self.commits))[root]
        if not has_state:
            raise Violation(f"ranks {engine.world.origins} take their state from {origin}, a spare without one")
        self.history, self.commits = list(found[0]), found[1]
        self.save()
        self.owner.has_state = True


def _train(state: _State) -> None:
    while len(state.history) < STEPS:
        engine = runtime.current("train").engine
        step = len(state.history)
        state.owner.compute(state.owner.job.plan.step_s)
        everyones = engine.exchange(("step", step), list(state.history))
        if any(each != state.history for each in everyones):
            raise Violation(f"survivors {engine.world.origins} do not agree: {everyones}")
        state.history.append(engine.world.origins)
        state.commit()


class _Events:
    """ringrun's queue."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()
        self.until_s = math.inf
        self.job: SimulatedJob | None = None

    def get(self, timeout: float) -> Any:
        if self.waiting:
            return self.waiting.popleft()
        self.until_s = self.job.now_s + timeout
        raise queue.Empty


class SimulatedJob:
    """See above."""

    def __init__(self, plan: Plan) -> None:
        _jobs[:] = [self]
        in_flight._OF_PROCESS.clear()
        self.plan = plan
        self.now_s = 0.0
        self.ready: list[Rank] = []  # which have something to do
        self.said: list[str] = []  # what ringrun has printed
        self.broken: BaseException | None = None
        self.died_s: dict[int, float] = {}
        self.trace: list[Any] = []  # when messages were sent, and which way: equal traces are equal runs
        self.turns = 0  # how often a rank has waited
        self.still = len(plan.faults) + (plan.arrival is not None)  # what is still to happen of the plan
        self.done = [0] * plan.size  # by rank: what it had done when the last of that happened
        self.known = plan.size  # and what ringrun had heard
        self.points: list[int] = []  # after what of that hosts may come; after the rest it is the same, or ignored
        self.seen = (-1.0, -1)  # when ringrun heard the last, and what had been sent by then
        self.in_init: set[int] = set()
        self._heap: list[Any] = []
        self._numbers = itertools.count()
        self._delays = deque(plan.delays)
        self._last_s: Counter[Any] = Counter()  # by link: when its last message arrives
        self._events = _Events()
        self._events.job = self
        self.heard = 0
        self._main = _Main()
        self.code: int | None = None
        self.why = ""  # it cannot go on
        self.over = self.left = False
        self.lists: dict[int, tuple[int, ...]] = {0: tuple(range(plan.np))}
        self.gone: dict[int, set[int]] = {0: set()}  # by list: who is dead
        self.worked: defaultdict[int, set[int]] = defaultdict(set)  # by list: who says that it works
        self.ranks = [Rank(self, number) for number in range(plan.size)]
        limits = Elastic(plan.min_np, plan.spares, plan.max_failures, stalled_s=STALL_S)
        job = Job(plan.size, ["train"], elastic=limits)
        fake = SimpleNamespace(
            send=lambda rank, message: self._tell(rank, wire.decode(wire.encode(message))),
            broadcast=self._tell_all,
            set_up=self._set_up,
            message=self._print,
            colours=False,
            end_agents=lambda end: None,
            end=lambda steps: None,
            close=lambda: None,
            tail=[],
            name="mpirun",
            code=0,
        )
        self.supervisor = supervise.Supervisor(job, fake, fake, fake, self._events)

    def happens(self) -> None:
        """Something does that is in the plan."""
        self.still -= 1
        self.done, self.known = [each.actions for each in self.ranks], self.heard

    def one_more(self, how: str) -> Iterator[Plan]:
        """The plan with another fault, or an arrival ("hosts"), at every point after all that it has."""
        if self.still:
            return
        if how == "hosts":
            yield from (self.plan._replace(arrival=heard) for heard in self.points if heard > self.known)
            return
        for rank in self.ranks:
            for when in rank.points if not rank.faults else ():
                if when > self.done[rank.number]:
                    yield self.plan._replace(faults=[*self.plan.faults, Fault(rank.number, when, how)])

    # Time

    def later(self, after_s: float, function: Callable[..., Any], *arguments: Any) -> None:
        """Call it then."""
        heapq.heappush(self._heap, (self.now_s + after_s, next(self._numbers), function, arguments))

    def delay(self) -> float:
        """Of the next message."""
        return TICK_S * (1 + (self._delays.popleft() if self._delays else 0))

    def send(self, link: Any, function: Callable[..., Any], *arguments: Any, extra_s: float = 0.0) -> None:
        """Call it when a message has arrived; those of a link keep their order."""
        self.trace.append((self.now_s, link))
        at_s = self._last_s[link] = max(self._last_s[link], self.now_s + self.delay() + extra_s)
        heapq.heappush(self._heap, (at_s, next(self._numbers), function, arguments))

    def has_mpi_heard(self, rank: int) -> bool:
        return self.now_s >= self.died_s.get(rank, math.inf) + 2 * TICK_S

    # Who runs

    def hand_over(self, me: Any) -> None:
        """Let others run, until it is this one's turn."""
        self.turns += 1
        after = self.next_turn()
        if after is not me and after is not getattr(me, "routine", None):
            after.turn.release()
            (me.routine if isinstance(me, Rank) else me).turn.acquire()

    def next_turn(self) -> Any:
        """Whose turn it is: what happens meanwhile happens here."""
        try:
            while self.broken is None and self.code is None:
                if self.ready:
                    rank = self.ready.pop(0)
                    if rank.runs and not rank.stopped:
                        return rank.routine
                elif not self._pass_time():
                    break
        except BaseException as error:
            self.broken = error
        return self._main

    def _pass_time(self) -> bool:
        """Do what comes next; False when nothing does."""
        at_s = min(self._heap[0][0] if self._heap else math.inf, self._events.until_s)
        if at_s > LONGEST_S:
            return False
        self.now_s = max(self.now_s, at_s)
        if self._heap and self._heap[0][0] <= at_s:
            _, _, function, arguments = heapq.heappop(self._heap)
            function(*arguments)
        else:
            self._supervise()
        return True

    def run(self) -> int:
        """Run it to its end; returns ringrun's exit code. Raises Violation."""
        for rank in range(self.plan.size):
            self.put(Arrived(rank, "h", 2345))
        self.hand_over(self._main)
        idle = self.supervisor._losses.idle
        left = [each for each in self.ranks if each.runs and each.number not in idle]
        self._unwind()
        if self.broken is not None:
            raise self.broken
        if self.code is None:
            if left and all(each.stopped for each in left):
                return -1  # and nobody is there to miss them
            raise Violation(f"ranks wait for ever: {[each.number for each in left]}")
        self._verify()
        return self.code

    def _verify(self) -> None:
        """What must be true of every job that has ended."""
        named = [int(each) for line in self.said for each in re.findall(r"^-- ringrun: rank (\d+) ", line)]
        named += [int(each) for line in self.said for each in re.findall(r"^(?:failed too  | {12})rank (\d+) ", line)]
        failed = {each.number for each in self.ranks if each.cause in FATAL and each.cause != "exit0"}
        first = [
            int(each) for line in self.said for each in re.findall(r"^-- ringrun: rank (\d+) of \d+ failed first", line)
        ]
        hung = any(each.cause in ("stop", "woken", "killed", "exit0") for each in self.ranks)
        if self.now_s > (200 if hung else 10) + 4 * STEPS * self.plan.step_s:
            raise Violation(f"it took {self.now_s:.0f} s")
        heard = {each for each in failed if each in self.supervisor._ranks.ends}
        if set(named) - failed:
            raise Violation(f"ranks {named} are named, and {sorted(failed)} have failed")
        if self.supervisor.grows:
            return
        if heard - set(named):
            raise Violation(f"ranks {named} are named, and {sorted(heard)} have failed")
        if self.code == 0:
            if len(set(named)) < len(named):
                raise Violation(f"ranks {named}: one is named twice")
            if first or self.why:
                raise Violation("it failed, but its exit code is 0")
            lazy = [each.number for each in self.ranks if each.runs and each.number not in self.supervisor._losses.idle]
            if lazy:
                raise Violation(f"ranks {lazy} were left alone")
            self._verify_results()
            return
        if "which ended with exit code 0" in self.why:
            return
        if len(first) != 1:
            raise Violation(f"no cause is named: {self.said}")
        self._verify_cause(first[0])

    @staticmethod
    def check(is_true: bool, otherwise: str) -> None:
        """Raise Violation."""
        if not is_true:
            raise Violation(otherwise)

    def _verify_list(self, said: wire.Membership) -> None:
        """Those of a host that is lost are left out together."""
        hosts = self.plan.hosts
        lost = {hosts[int(rank)] for rank in said.dead if hosts and self.ranks[int(rank)].cause == "host"}
        late = [rank for rank in said.ranks if hosts and hosts[rank] in lost and self.ranks[rank].cause == "host"]
        if late and max(self.plan.delays, default=0) <= SOON:
            raise Violation(f"list {said.number} has ranks {late}, whose host is lost")

    def _verify_results(self) -> None:
        done = [each for each in self.ranks if each.finished]
        if not done and "exit0" not in [each.cause for each in self.ranks]:
            raise Violation("nobody has finished")
        for each in done:
            if len(each.finished[1]) != STEPS or each.finished[1][:-1] != done[0].finished[1][:-1]:
                raise Violation(f"ranks end with {done[0].finished} and {each.finished}")
            for other in done:
                if each.finished[0] == other.finished[0] and each.finished != other.finished:
                    raise Violation(f"ranks end with {other.finished} and {each.finished}")

    def _verify_cause(self, first: int) -> None:
        """The rank by which the job fails."""
        cause = self.ranks[first].cause
        code = {"kill": 137, "killed": 137, "exit7": 7}.get(cause, 1)
        if self.code != code:
            raise Violation(f"the exit code is {self.code}, and rank {first} ended by {cause}")
        blamed = "did not catch" in self.why
        late = "did not go on within" in self.why
        settled = {
            rank
            for number, ranks in self.lists.items()
            if self.worked.get(number, set()) >= set(ranks)
            for rank in self.gone[number]
        }
        excused = {rank for number in self.worked for rank in self.gone[number]} if not (blamed or late) else settled
        if first in excused:
            raise Violation(f"rank {first} is the cause, without which the job had gone on")
        failed = {each.number for each in self.ranks if each.cause in FATAL and each.cause != "exit0"} - excused
        if "before init() returned" not in self.why:
            failed -= {
                rank for rank in failed if not any(rank in ranks for ranks in self.lists.values())
            }  # idle spares
        if blamed and cause == "blame" and failed - {each.number for each in self.ranks if each.cause == "blame"}:
            raise Violation(f"rank {first} is the cause, which blames others")
        if not blamed:
            earliest = min(
                failed, key=lambda each: (self.ranks[each].cause not in CUTS, self.died_s.get(each, math.inf))
            )
            if earliest != first and self.died_s[earliest] < self.died_s[first]:
                raise Violation(f"rank {first} is the cause, and rank {earliest} failed earlier")

    def _verify_end(self) -> None:
        """The job is about to end: could others have gone on?"""
        plan = self.plan
        idle = self.supervisor._losses.idle if self.left else ()  # the job is about to end, and takes no more
        living = [each for each in self.ranks if each.cause not in FATAL and each.number not in idle]
        heard = set(range(plan.np)).union(*self.worked.values())  # of others it is not known whether they have a state
        good = [each for each in living if each.has_state and each.number in heard]
        failures = sum(each.cause in FATAL and each.cause != "exit0" for each in self.ranks)
        justified = (
            len(living) < plan.min_np
            or not good
            or (plan.max_failures is not None and failures > plan.max_failures)
            or "before init() returned" in self.why
            or ("did not catch" in self.why and any(each.cause == "blame" for each in self.ranks))
            or (
                "did not go on within" in self.why
                and any(each.cause in ("stop", "woken", "killed") for each in self.ranks)
            )
            or ("which ended with exit code 0" in self.why and any(each.cause == "exit0" for each in self.ranks))
        )
        if not justified:
            raise Violation(f"{self.why}, but ranks {[each.number for each in good]} are healthy")

    def _unwind(self) -> None:
        """Let the threads of all ranks end."""
        self.next_turn = lambda: self._main  # type: ignore[method-assign]
        for each in self.ranks:
            if not hasattr(each, "routine_ended"):
                each.runs = False
                each.routine.turn.release()
                self._main.turn.acquire()

    # ringrun

    def put(self, event: Any) -> None:
        """ringrun hears of something."""
        self.left |= isinstance(event, Reported) and isinstance(event.message, wire.Left)
        if not self.why and isinstance(event, Reported) and isinstance(event.message, wire.Reformed):
            self.worked[event.message.number].add(event.rank)
        self._events.waiting.append(event)
        self.heard += 1
        self._supervise()
        if not self.over and self.supervisor._shutdown is None and self.seen != (self.now_s, len(self.trace)):
            self.seen = (self.now_s, len(self.trace))
            self.points.append(self.heard)
        if self.heard == self.plan.arrival:
            self.happens()
            self._events.waiting.append(HostsCame(("h9",), self.plan.size + 1))
            self._supervise()

    def _supervise(self) -> None:
        """Let ringrun do what it can do now."""
        if self.over:
            return
        supervisor, events = self.supervisor, self._events
        events.until_s = self.now_s
        while events.until_s <= self.now_s and not supervisor.is_over():
            events.until_s = self.now_s  # until it waits
            supervisor.take_step()
        if supervisor.is_over():
            self.over = True
            self.code = supervisor.run()

    def _set_up(self) -> None:
        for each in self.ranks:
            self.later(self.delay(), each.notify)

    def _tell(self, rank: int, message: wire.Message) -> None:
        if isinstance(message, wire.Signal) and self.supervisor._shutdown is None and not self.over:
            self._kills(rank)
        self.send(("down", rank), self.ranks[rank].told, message)

    def _tell_all(self, message: wire.Message) -> None:
        if isinstance(message, wire.Membership):
            self.lists[message.number] = message.ranks
            self._verify_list(message)
            self.gone[message.number] = set(map(int, message.dead))
        same = wire.decode(wire.encode(message))
        for each in self.ranks:
            self._tell(each.number, same)

    def _kills(self, rank: int) -> None:
        if self.ranks[rank].cause in ("stop", "woken"):
            self.ranks[rank].cause = "killed"
        elif self.ranks[rank].runs:
            raise Violation(f"ringrun kills rank {rank}, which is healthy")

    def expelled(self, rank: Rank) -> None:
        if rank.has_agent:
            raise Violation(f"rank {rank.number}, which is healthy, is given up")

    def _print(self, lines: Sequence[str]) -> None:
        self.said += lines
        if lines[0].startswith(CANNOT):
            self.why = lines[0].removeprefix(CANNOT)
            self._verify_end()

    # What the ranks share

    def leaves(self, there: Rank, source: int) -> None:
        there.left.add(source)
        there.notify()

    def history_of(self, rank: Rank) -> list[Any]:
        return rank.state.history


class _Current(threading.local):
    rank: Any = None


_current = _Current()
_jobs: list[SimulatedJob] = []  # the last one runs


def _send(error_file: str, message: dict[str, Any]) -> bool:
    return _current.rank.say(message)


class _StatusServer:
    """What hears of lists."""

    def __init__(self, error_file: str, waiting_for: Callable[[], str], members: Any) -> None:
        _current.rank.members = members
        launcher_link._send(error_file, {"started": "ringreduce", "shared": []})


class _Condition:
    """Of the thread that listens, and of the rank's own."""

    def __init__(self) -> None:
        self._rank = _current.rank

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None:
        self._rank.notify()

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        until_s = _now_s() + (math.inf if timeout_s is None else timeout_s)
        while not is_true() and _now_s() < until_s:
            self._rank.wait(until_s - _now_s())
        return is_true()


def _now_s() -> float:
    return _jobs[-1].now_s


def _exit(code: int) -> None:
    raise _Expelled


def _sleep(seconds: float) -> None:
    _current.rank.wait(max(seconds, 1.0))  # whatever it looks for between its sleeps wakes it earlier


@contextlib.contextmanager
def simulation() -> Iterator[None]:
    """Let jobs be simulated in it."""
    clock = SimpleNamespace(monotonic=_now_s, sleep=_sleep, time=_now_s, perf_counter=_now_s)
    mpi = SimpleNamespace(
        COMM_WORLD=SimpleNamespace(Get_attr=lambda _: 1 << 30), TAG_UB=0, Exception=_MpiError, Status=object
    )
    system = SimpleNamespace(sched_yield=lambda: _sleep(1.0), _exit=_exit)
    with contextlib.ExitStack() as stack:
        for module in (survivors, reform, runtime, ringreduce.membership, losses, supervise):
            stack.enter_context(mock.patch.object(module, "time", clock))
        stack.enter_context(
            mock.patch.object(signal, "valid_signals", functools.cache(signal.valid_signals))
        )  # quicker
        for module in (survivors, ringreduce.membership):
            stack.enter_context(mock.patch.object(module, "os", system))
        stack.enter_context(
            mock.patch.object(ringreduce.membership, "threading", SimpleNamespace(Condition=_Condition))
        )
        stack.enter_context(mock.patch.object(ringreduce.membership, "print", create=True))
        stack.enter_context(mock.patch.multiple(worlds, StatusServer=_StatusServer, outlive_daemon=lambda: None))
        stack.enter_context(mock.patch.object(worlds.death_notice, "give"))
        stack.enter_context(mock.patch.object(launcher_link, "_send", _send))
        stack.enter_context(mock.patch.object(runtime, "Engine", _Engine))
        stack.enter_context(mock.patch.object(MessageTransport, "_mpi", mpi))
        yield
