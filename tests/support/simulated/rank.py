"""A rank of a simulated job, from its start to its end: its process, what happens to it, and its agent."""

from __future__ import annotations

import _thread
import json
import math
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ringreduce import elastic, runtime
from ringreduce.arrays.device_selection import NOT_ASKED
from ringreduce.errors import PeerLostError
from ringreduce.execution.host import HostResources
from ringreduce.monitor import launcher_link
from ringreduce.runtime.recovery.elastic_runtime import ElasticRuntime
from ringreduce.runtime.recovery.membership import Members
from ringreduce.settings import Settings
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.world import World
from ringrun.agent.rank_socket import _report
from ringrun.connection import wire
from ringrun.job.events import RankDied, RankEnded, Reported
from ringrun.report.outcome import RankEnd

from .fakes import CURRENT, Comm, State, train
from .network import FAILS, STALL_S, held_lock

if TYPE_CHECKING:
    from .job import SimulatedJob


class Rank:
    """A rank's process, and its agent."""

    def __init__(self, job: SimulatedJob, number: int) -> None:
        self.job, self.number = job, number
        self.faults = {each.when: each.how for each in job.plan.faults if each.rank == number}
        self.actions = 0  # what it has done
        self.seen = (-1, -1)  # what had happened before the last
        self.busy_at = 0  # before which of them it is in the middle of its first step
        self.runs, self.stopped, self.has_agent, self.has_ended = True, False, True, False
        self.cause = ""  # the fault that it has suffered
        self.died_s = math.inf
        self.failure: BaseException | None = None  # to be raised in it
        self.killed_by: list[int] = []  # signals of ringrun's
        self.members: Members | None = None
        self.kept: dict[type, dict[str, Any]] = {}  # what its agent has kept for it
        self.mail: defaultdict[Any, dict[int, Any]] = defaultdict(dict)  # of its engine
        self.left = self.mail["left"]  # ranks that have left their world in order
        self.arrived: defaultdict[Any, deque[bytes]] = defaultdict(deque)  # by source and tag: MPI's messages
        self.has_state = number < job.plan.np
        self.finished: tuple[int, list[Any]] | None = None  # its rank in the last world, and who took part in each step
        self.error: wire.RankError | None = None
        self.turn = held_lock()
        _thread.start_new_thread(self._run, ())

    # What the rank does

    def _run(self) -> None:
        self.turn.acquire()
        CURRENT.rank = self
        try:
            self.end(self._live())
        except SystemExit:  # its process is no more
            pass
        except BaseException as error:
            self.job.fail(error)
        self.has_ended = True
        self.job.next_turn().release()

    def _live(self) -> int:
        try:
            self._program()
        except AssertionError:
            raise
        except Exception as error:
            lost = tuple(error.lost_ranks) if isinstance(error, PeerLostError) else ()
            self.error = wire.RankError(type(error).__name__, str(error), "", lost)
            if str(error).startswith("only spares ("):
                self.cause = "raise"
                if any(each.finished for each in self.job.ranks):
                    raise AssertionError(f"rank {self.number} is left alone") from error
            if not self.cause:
                raise AssertionError(f"rank {self.number} fails: {error!r}") from error
            return 1
        return 0

    def _program(self) -> None:
        plan = self.job.plan
        settings = Settings(
            elastic=True, spares=plan.spares, error_file=str(self.number), stall_abort_s=STALL_S, stall_check_s=0.0
        )
        comm = Comm(self)
        whole = World(self.number, plan.size, plan.host_of, comm, comm, comm, origins=tuple(range(plan.size)))
        self._await_init()
        transport = MessageTransport(whole)
        host = HostResources(whole, transport, settings, cores=1)
        made = ElasticRuntime(runtime.Setup(whole, transport, host, [0.0] * plan.size), settings, NOT_ASKED)
        with runtime.bound(made):
            state = State(self)
            elastic.run(train)(state)
            self.finished = made.world.number, state.history
            if isinstance(self.failure, PeerLostError) and not self.cause:
                self.cause = "blame"
                raise self.failure
        made.leave_at_exit("its script ended")

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
        if self.runs:
            self.actions += 1
            if self.seen != (seen := (self.job.sent, self.job.turns)):
                self.seen = seen
                self.job.points.append((self, self.actions))
            if how := self.faults.get(self.actions):
                self.suffer(how)
        if self.stopped:
            self._await_turn()
        if not self.runs:
            raise SystemExit

    def wait(self, timeout_s: float = math.inf) -> None:
        """Let others run until something has happened to this rank, or the time is over."""
        self.act()
        self.job.later(timeout_s, self.notify)
        self._await_turn()

    def compute(self, seconds: float) -> None:
        """Be busy, and hear nothing."""
        for until_s in (self.job.now_s + seconds / 2, self.job.now_s + seconds) if seconds else ():
            while self.job.now_s < until_s:
                self.wait(until_s - self.job.now_s)
            self.busy_at = self.busy_at or self.actions + 1

    def _await_turn(self) -> None:
        self.job.hand_over(self.turn)
        if not self.runs:
            raise SystemExit

    def notify(self) -> None:
        """Something has happened to it."""
        if not self.stopped and self not in self.job.ready:
            self.job.ready.append(self)

    def send(self, there: int, function: Callable[..., Any], *arguments: Any) -> None:
        """MPI's messages."""
        self.act()
        self.job.send(("mpi", self.number, there), function, *arguments)

    def exchange(self, world: World, name: Any, value: Any, check: Callable[[], None]) -> list[Any]:
        """Everybody's value, by rank of the world; `check` may raise."""
        job, origins, mail = self.job, world.origins, self.mail[world.number, name]
        for each in origins:
            if each != self.number:
                self.send(each, job.ranks[each].collect, (world.number, name), self.number, value)
        mail[self.number] = value
        waits_s = job.now_s
        while missing := [each for each in origins if each not in mail]:
            check()
            if gone := self.left.keys() & missing:
                raise PeerLostError("it has left", [origins.index(min(gone))])
            if job.now_s > waits_s + STALL_S:
                mute = [each for each in missing if job.ranks[each].stopped or not job.ranks[each].runs]
                if mute or world.rank == 0:
                    launcher_link.report(str(self.number), suspects=mute or missing, why="it waits")
                waits_s = job.now_s
            self.wait(STALL_S + 1)
        check()
        return [mail[each] for each in origins]

    def collect(self, key: Any, source: int, value: Any) -> None:
        """A message of another rank's engine has arrived."""
        self.mail[key][source] = value
        self.notify()

    def deliver(self, key: Any, content: bytes) -> None:
        """A message of MPI's has arrived."""
        self.arrived[key].append(content)
        self.notify()

    # What happens to it

    def suffer(self, how: str) -> None:
        """A fault. What ends or hangs before init() returns is no matter of membership."""
        job = self.job
        if self.cause or (how in ("exit0", "stop") and self.number not in job.in_init):
            return
        job.happens()
        if how == "raise":
            self.failure = ValueError("on purpose")
        elif how == "blame":
            if self.members and (dead := self.members.newest.dead):
                self.failure = PeerLostError("of an operation of a world before", sorted(dead))
        elif how == "stop":
            self.cause, self.stopped = how, True
        elif how in ("agent", "host"):
            host_of = job.plan.host_of
            beside = [each for each in job.ranks if host_of[each.number] == host_of[self.number]]
            for each in beside if how == "host" else [self]:
                if each.has_agent and each.runs:
                    each.cut(how)
                    each.vanish()
        elif how == "cut":
            self.cut(how)
            job.later(job.delay() * 10, self.vanish)
        else:
            self.cause = how
            self.end(FAILS[how])

    def cut(self, cause: str) -> None:
        """Its agent is lost."""
        self.cause, self.has_agent = cause, False
        self.died_s = self.job.now_s
        self._report(RankEnded(RankEnd(self.number, "h", 1, None, 0.0)))

    def end(self, code: int) -> None:
        """Its process has ended."""
        if not self.runs:
            return
        self.vanish()
        if self.has_agent:
            self._report(RankDied(self.number, code))
            end = RankEnd(self.number, "h", 1, code, self.job.now_s, tuple(self.killed_by), self.error)
            self._report(RankEnded(end), self.job.plan.report_s)

    def vanish(self) -> None:
        """The process is gone."""
        self.runs = self.stopped = False
        self.died_s = min(self.died_s, self.job.now_s)
        for each in self.job.ranks:  # MPI hears of it, some time
            self.job.later(self.job.delay() * 3, each.notify)

    # What its agent does

    def _report(self, event: Any, extra_s: float = 0.0) -> None:
        self.job.send(("agent", self.number), self.job.put, event, extra_s=extra_s)

    def _pass_on(self, kept: Iterable[dict[str, Any]]) -> None:
        for said in kept:
            self.job.send(("ask", self.number), self.hear, said)

    def say(self, message: dict[str, Any]) -> bool:
        """The rank says something to its agent, which passes it on."""
        self.act()
        if self.has_agent:
            report = _report(json.loads(json.dumps(message)))
            self._report(Reported(self.number, wire.decode(wire.encode(report))))
            if isinstance(report, wire.Initialized):
                self._pass_on(self.kept.values())
        return True

    def told(self, message: wire.Message) -> None:
        """Its agent hears something of ringrun's."""
        if not self.has_agent:
            return
        if isinstance(message, wire.Signal):
            self.killed_by.append(message.number)
            if message.number == signal.SIGKILL or not self.stopped:
                self.end(-message.number)
        elif isinstance(message, wire.WakeUp) and self.stopped:
            self.stopped = False
            self.cause = "woken" if self.cause == "stop" else self.cause  # ringrun may kill it in the same moment
            self.notify()
            self._pass_on(self.kept.values())
        elif isinstance(message, wire.Membership | wire.Hosts):
            fields = message._asdict()
            self.kept[type(message)] = {"membership": fields} if isinstance(message, wire.Membership) else fields
            self._pass_on([self.kept[type(message)]])

    def hear(self, said: dict[str, Any]) -> None:
        """The rank's thread that listens hears something; that of a stopped rank will when it goes on."""
        if self.members and self.runs and not self.stopped:
            try:
                self.members.hear(json.loads(json.dumps(said)))
            except SystemExit as end:
                assert not self.has_agent, f"rank {self.number}, which is healthy, is given up"
                self.end(end.code)
            self.notify()
