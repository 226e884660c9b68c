"""Decides when ranks must end and how, and says in the end what happened.

All decisions are made in one thread, from a queue of events: ranks that arrive and end (connection/channel.py),
mpirun's end, signals. A rank that ends with 0 changes nothing; the first that fails, or a signal, begins an escalation.
"""

import math
import os
import queue
import signal
import time
from collections.abc import Sequence

from ..connection.channel import (
    Arrived,
    Channel,
    Event,
    Events,
    LauncherEnded,
    OutputClosed,
    RankEnded,
    RankNotStarted,
    RankStalled,
    RankState,
    Signalled,
    StacksWanted,
)
from ..connection.wire import Ask, Signal
from ..errors import LauncherError, MachineError, NotStartedError, UsageError
from ..output.display import Output
from ..report import outcome
from ..report.card import card
from ..report.outcome import RankEnd
from ..report.states import stacks_report
from ..text import numbered
from .escalation import AFTER_FAILURE, AFTER_INTERRUPT, AFTER_TERMINATE, AFTER_TIMEOUT, AT_ONCE, Escalation, Step
from .inquiry import Deliver, Inquiries, Inquiry, nobody
from .mpirun import MpiLauncher
from .plan import Job

_LAUNCHER_STEPS = (Step(None, 1.0), Step(signal.SIGTERM, 0.5), Step(signal.SIGKILL, 0.5))
_TIMEOUT_EXIT_CODE = 124  # that of timeout(1)
_STACKS_INTERVAL_S = 60.0
_LONGEST_WAIT_S = 3600.0  # of one wait: a queue does not take just any number


class Supervisor:
    """One job, from its start to its exit code."""

    def __init__(
        self,
        job: Job,
        launcher: MpiLauncher,
        channel: Channel,
        output: Output,
        events: Events,
        home: dict[str, str],
        abroad: dict[str, str],
        deadline_s: float | None = None,
        lost_peer_code: int | None = None,
    ) -> None:
        """home, abroad: variables of the ranks on this host, and on others, besides what mpirun gives them.

        deadline_s: when the job's time is over, if not `timeout_s` from now: there were attempts before.
        lost_peer_code: the engine's.
        """
        self._lost_peer_code = lost_peer_code
        self._job = job
        self._size = job.size
        self._home, self._abroad = home, abroad
        self._launcher = launcher
        self._channel = channel
        self._output = output
        self._events = events
        self._arrived: set[int] = set()
        self._ends: dict[int, RankEnd] = {}
        self._refusal: LauncherError | None = None  # why the job cannot run as the user wants it
        self._escalation: Escalation | None = None
        now_s = time.monotonic()
        self._timeout_s = math.inf if job.timeout_s is None else job.timeout_s
        self._deadline_s = now_s + self._timeout_s if deadline_s is None else deadline_s
        self._start_deadline_s = now_s + job.start_timeout_s  # infinite once all have arrived
        self._too_slow = False  # not all have arrived by then
        self._timeout_report: str | None = None  # if the job has taken too long
        self._stopped_by: int | None = None  # the signal that ended the job, if no rank had failed before
        self._launcher_said: list[str] = []
        self._failed = False  # a rank has failed, or was lost
        self._was_told = False  # by a signal to end the job
        self._hosts: dict[int, str] = {}
        self._inquiries = Inquiries()
        self._at_end: Inquiry | None = None  # what the ranks that still ran did when the job began to end
        self._stacks_again_s = 0.0  # not before then does a stall print all stacks again

    def run(self) -> int:
        """Return ringrun's exit code, when the job and all its processes are gone."""
        while not self._is_over():
            self._take_step()
        self._end_launcher()
        return self._conclude()

    @property
    def failed(self) -> bool:
        """Whether a rank has failed or was lost, and no signal wants the job ended: a restart may help."""
        return self._failed and not self._was_told

    def _is_over(self) -> bool:
        if self._escalation is None:
            return len(self._ends) == self._size
        timed_out = self._escalation.exhausted and self._escalation.due(time.monotonic())
        return timed_out or self._arrived <= self._ends.keys()

    def _take_step(self) -> None:
        """Handle one event, or go one step further in ending the job."""
        now_s = time.monotonic()
        self._inquiries.expire(now_s)
        if self._escalation and self._escalation.due(now_s):
            if (number := self._escalation.advance(now_s)) is not None:
                self._channel.broadcast(Signal(number))
            return
        next_s = min(self._deadline_s, self._start_deadline_s)
        deadline_s = self._escalation.deadline_s if self._escalation else next_s
        wait_s = min(deadline_s, self._inquiries.deadline_s) - now_s
        try:
            self._handle(self._events.get(timeout=min(max(0.0, wait_s), _LONGEST_WAIT_S)))
        except queue.Empty:
            if time.monotonic() >= self._start_deadline_s and self._escalate(AT_ONCE):
                self._too_slow = True
            if time.monotonic() >= self._deadline_s and self._escalate(AFTER_TIMEOUT):
                self._at_end = self._ask()
                self._timeout_report = outcome.timeout_report(
                    self._timeout_s,
                    self._arrived - self._ends.keys(),
                    set(range(self._size)) - self._arrived,
                    self._size,
                )

    def _handle(self, event: Event) -> None:
        match event:
            case Arrived(rank, host, port):
                self._arrived.add(rank)
                self._hosts[rank] = host
                if not port and self._escalate(AT_ONCE):
                    self._refusal = MachineError(
                        f"MASTER_PORT={self._job.master_port} is in use on {host}, where rank 0 would listen, or is "
                        "no port; set another, or unset it, and ringrun finds a free one"
                    )
                if self._escalation and self._escalation.latest:
                    self._channel.send(rank, Signal(self._escalation.latest))
                elif self._escalation is None and len(self._arrived) == self._size:
                    self._start_deadline_s = math.inf
                    self._channel.set_up(os.getcwd(), self._home, self._abroad)
            case RankEnded(end):
                self._ends[end.rank] = end
                if end.failed and self._escalate(AFTER_FAILURE):
                    self._at_end = self._ask()
            case RankNotStarted(rank, host, reason):
                where = f"rank {rank} on host {host}"
                self._refusal = self._refusal or UsageError(f"the command cannot be executed: {reason}, says {where}")
                self._ends[rank] = RankEnd(rank, host, 0, 0, 0.0)
                self._escalate(AFTER_FAILURE)
            case LauncherEnded():
                self._escalate(AFTER_FAILURE)
            case Signalled(signal.SIGUSR1):
                self._show_stacks("ringrun: what the ranks do:")
            case Signalled(number):
                self._obey(number)
            case RankState(rank, state):
                self._inquiries.answer(rank, state)
            case RankStalled(rank, report):
                self._tell_stall(rank, report)
            case StacksWanted(deliver):
                self._ask(lambda inquiry: deliver(self._stacks(inquiry)))
            case OutputClosed():
                if self._escalate(AFTER_TERMINATE):
                    self._stopped_by = signal.SIGPIPE

    def _ask(self, deliver: Deliver = nobody) -> Inquiry:
        """Ask all ranks that run what they do; `deliver` is called when they have answered, or have not in time."""
        inquiry = self._inquiries.begin(self._arrived - self._ends.keys(), time.monotonic(), deliver)
        for rank in inquiry.asked:
            self._channel.send(rank, Ask(inquiry.number))
        return inquiry

    def _stacks(self, inquiry: Inquiry) -> list[str]:
        return stacks_report(inquiry.asked, inquiry.answers, self._size, self._hosts)

    def _show_stacks(self, headline: str) -> None:
        self._ask(lambda inquiry: self._output.message([headline, *self._stacks(inquiry)]))

    def _tell_stall(self, rank: int, report: str) -> None:
        """Print a stall report of ringreduce's, and all ranks' stacks unless they were printed a short while ago."""
        now_s = time.monotonic()
        headline = f"ringrun: the job is stalled, says rank {rank}: {report}"
        if now_s < self._stacks_again_s:
            self._output.message([headline])
        else:
            self._stacks_again_s = now_s + _STACKS_INTERVAL_S
            self._show_stacks(headline)

    def _escalate(self, steps: Sequence[Step]) -> bool:
        """Begin to end the job, and return True, unless its ending has begun."""
        if self._escalation is not None:
            return False
        self._escalation = Escalation(steps, time.monotonic())
        return True

    def _obey(self, number: int) -> None:
        self._was_told = True
        if not self._escalate(AFTER_INTERRUPT if number == signal.SIGINT else AFTER_TERMINATE):
            self._escalation = Escalation(AT_ONCE, time.monotonic())
            return
        self._stopped_by = number
        self._take_step()
        left = len(self._arrived - self._ends.keys())
        what = "interrupted" if number == signal.SIGINT else f"got {signal.Signals(number).name}"
        self._output.message([f"ringrun: {what}; ending {left} rank{'' if left == 1 else 's'}"])

    def _end_launcher(self) -> None:
        """Let the agents go, and see mpirun's end."""
        self._launcher_said = self._launcher.tail  # what it says from here on is our doing
        for rank in self._arrived - self._ends.keys():
            self._channel.send(rank, Signal(signal.SIGKILL))
        self._channel.end_agents()
        self._launcher.end(_LAUNCHER_STEPS)
        self._channel.close()

    def _conclude(self) -> int:
        """Print what there is to say, last of all, and return the exit code."""
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        if self._timeout_report:
            stacks = self._stacks(self._at_end) if self._at_end else []
            self._output.message([*stacks, self._timeout_report])
            return _TIMEOUT_EXIT_CODE
        if self._too_slow:
            raise MachineError(self._missing(f"the {self._job.start_timeout_s:g} s of --start-timeout were over"))
        if self._refusal:
            raise self._refusal
        ends = self._ends.values()
        aborter = outcome.aborter(ends, self._launcher.code)
        if cause := aborter or outcome.root_cause(ends, self._lost_peer_code):
            self._failed = True
            self._output.message(self._card(cause))
            return outcome.exit_code(cause)
        if self._escalation is None:
            return 0
        return self._conclude_without_cause()

    def _card(self, cause: RankEnd) -> list[str]:
        return card(
            cause,
            self._ends.values(),
            self._size,
            launcher_tail=self._launcher_said,
            asked=self._at_end.asked if self._at_end else (),
            states=self._at_end.answers if self._at_end else {},
            colour=self._output.colours,
        )

    def _conclude_without_cause(self) -> int:
        """mpirun ended, and no rank had failed."""
        code = self._launcher.code
        said = "\n".join(self._launcher.tail)
        if len(self._arrived) < self._size:
            raise NotStartedError(self._missing(f"{self._launcher.name} ended with exit code {code}"))
        self._failed = True
        what = f"ringrun: {self._launcher.name} ended with exit code {code} before the ranks did; it wrote:"
        self._output.message([what, said])
        return code if code and code > 0 else 1

    def _missing(self, what: str) -> str:
        """Return which ranks had not come to life, and on which hosts; none had begun the command."""
        absent = sorted(set(range(self._size)) - self._arrived)
        hosts = ", ".join(dict.fromkeys(map(self._job.host_of, absent)))
        said = "\n".join(self._launcher_said) or "(nothing)"
        return (
            f"{what} when {len(self._arrived)} of {self._size} ranks had started; missing: "
            f"{numbered('rank', absent)} on {hosts}; "
            f"{self._launcher.name} wrote:\n{said}"
        )
