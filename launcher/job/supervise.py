"""Decides when ranks must end and how, and says in the end what happened.

All decisions are made in one thread, from a queue of events: ranks that arrive and end (ranks.py),
mpirun's end, signals. A rank that ends with 0 changes nothing; the first that fails, or a signal, begins the shutdown.
In an elastic job losses.py lets the others go on, as long as that is possible.
"""

import math
import queue
import signal
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

from ..connection import wire
from ..errors import MachineError, UsageError
from ..output.display import Output
from ..report import outcome
from ..report.answers import waiting
from ..report.outcome import RankEnd
from ..run_report import Collector, encode
from ..text import counted, listed, numbered
from . import events, shutdown
from .conclusion import WITHOUT_INIT, WITHOUT_LEAVING, Conclusion, Conclusions, Ranks, network_hint, raising
from .growth import Blacklist, InUse
from .init_watch import InitWatch
from .joining import Joining
from .losses import Losses
from .mpirun import MpiLauncher
from .plan import Job
from .questions import Deliver, Question, Questions, nobody
from .ranks import Agents

_LAUNCHER_STEPS = (shutdown.Step(None, 1.0), shutdown.Step(signal.SIGTERM, 0.5), shutdown.Step(signal.SIGKILL, 0.5))
_STACKS_INTERVAL_S = 60.0
_PROGRESS_S = 3.0  # a start that takes longer is told about, then after twice the time, and so on
_MOST_NOTICES = 1000  # that are remembered
_LONGEST_WAIT_S = 3600.0  # of one wait: a queue does not take just any number


class Supervisor:
    """One job, from its start to its exit code."""

    def __init__(
        self,
        job: Job,
        launcher: MpiLauncher,
        agents: Agents,
        output: Output,
        inbox: events.Events,
        deadline_s: float | None = None,
        lost_peer_code: int | None = None,
        blacklist: Blacklist | None = None,
        collector: Collector | None = None,
    ) -> None:
        """deadline_s: when the job's time is over, if not `timeout_s` from now: there were attempts before.

        lost_peer_code: the engine's.
        blacklist: of the hosts that restarts leave out.
        collector: of what ranks measure, for all attempts.
        """
        self._job = job
        self._launcher = launcher
        self._agents = agents
        self._output = output
        self._inbox = inbox
        self._lost_peer_code = lost_peer_code
        self._blacklist = blacklist
        now_s = time.monotonic()
        self._deadline_s = now_s + (job.timeout_s or math.inf) if deadline_s is None else deadline_s
        self._began_s = now_s
        self._start_deadline_s = now_s + job.start_timeout_s  # infinite once all have arrived
        self._progress_s = now_s + _PROGRESS_S if job.hosts else math.inf
        self._ranks = Ranks(job)
        self._collector = collector or Collector(job.command)
        self._collector.begin(job.size)
        self._conclusions = Conclusions(self._ranks, launcher, output, self._collector)
        self._shutdown: shutdown.Shutdown | None = None
        self._conclusion: Conclusion | None = None  # if the job ends for another reason than a rank's failure
        self._was_signalled = False  # by a signal to end the job
        self._failed = False  # a rank has failed, or was lost
        self._without_slot: set[int] = set()  # ranks whose lender has left, and not their host
        self.scales_up = False
        """Whether this attempt has ended so that the next one has more hosts."""
        self.keeps_commits = False
        """Whether the agents have left an elastic job's commits, for the next one."""
        self._init = InitWatch(job.size)
        self._joining = Joining(job.size)
        self._last_words: list[str] = []
        self._notices: dict[str, int] = {}  # who has said them
        note = partial(self._collector.note, "elastic")
        self._losses = Losses(job.size, job.elastic, agents, output, note) if job.elastic else None
        self._questions = Questions()
        self._stacks_again_s = 0.0  # not before then does a stall print all stacks again

    def run(self) -> int:
        """Return ringrun's exit code, when the job and all its processes are gone."""
        while not self.is_over():
            self.take_step()
        self._end_launcher()
        return self._conclude()

    @property
    def failed(self) -> bool:
        """Whether a rank has failed or was lost, and no signal wants the job ended: a restart may help."""
        return self._failed and not self._was_signalled

    def in_use(self) -> InUse | None:
        """Return what there is of the job now; another thread asks. A host all of whose agents are gone is lost.

        So is a slot whose lender has left; another one may lend it again.
        None also at the end, when all of them go.
        """
        if self._ranks.missing or self.is_over():
            return None
        job, gone = self._job, Counter(map(self._job.host_of, self._agents.gone.copy()))
        left = Counter(map(job.host_of, self._without_slot.copy()))
        slots = {host.name: (count - left[host.name]) * (gone[host.name] < count) for host, count in job.hosts}
        return InUse(job.size - len(self._ranks.ends), job.size, slots)

    def is_over(self) -> bool:
        """Return whether nothing is left to be decided: `run` then only concludes."""
        if self._shutdown is None:
            idle = self._losses.idle if self._losses else ()
            is_decided = self._losses is None or not self._losses.undecided
            return is_decided and len(self._ranks.ends) + len(idle) == self._job.size
        timed_out = self._shutdown.exhausted and self._shutdown.due(time.monotonic())
        return timed_out or not self._ranks.running

    def take_step(self) -> None:
        """Handle one event, or go one step further in ending the job."""
        now_s = time.monotonic()
        self._questions.expire(now_s)
        if self._shutdown and self._shutdown.due(now_s):
            if (number := self._shutdown.advance(now_s)) is not None:
                self._agents.broadcast(wire.Signal(number))
            return
        next_s = min(self._deadline_s, self._start_deadline_s, self._progress_s, self._init.due_s, self._init.ask_s)
        next_s = min(next_s, self._losses.due_s if self._losses else math.inf)
        deadline_s = self._shutdown.deadline_s if self._shutdown else next_s
        wait_s = min(deadline_s, self._questions.deadline_s) - now_s
        try:
            self._handle(self._inbox.get(timeout=min(max(0.0, wait_s), _LONGEST_WAIT_S)))
        except queue.Empty:
            self._look_at_the_time(time.monotonic())

    def _look_at_the_time(self, now_s: float) -> None:
        ranks = self._ranks
        if now_s >= self._start_deadline_s:
            self._end(shutdown.AT_ONCE, self._conclusions.started_too_slowly)
        if now_s >= self._deadline_s:
            late = partial(self._conclusions.took_too_long, set(ranks.running), set(ranks.missing))
            self._end(shutdown.AFTER_TIMEOUT, late)
        if now_s >= self._progress_s:
            self._progress_s = now_s + (now_s - self._began_s)
            if self._shutdown is None:
                started = f"{len(ranks.hosts)} of {self._job.size} ranks have started"
                self._output.message([f"ringrun: {started}, waiting for {listed(ranks.missing_hosts)}"])
        if now_s >= self._init.due_s and self._shutdown is None:
            self._report_init()
        if now_s >= self._init.ask_s and self._shutdown is None:
            self._init.ask_s = math.inf
            if self._losses is None:
                self._ask(self._look_who_waits)
        if self._losses and self._shutdown is None:
            self._go_on_or_end(self._losses.too_late(now_s))

    def _handle(self, event: events.Event) -> None:
        ranks = self._ranks
        if self._losses and self._shutdown is None:
            self._go_on_or_end(self._losses.handle(event))
        match event:
            case events.Arrived():
                self._on_arrival(event)
            case events.Refused(reason) if ranks.missing:
                self._end(shutdown.AT_ONCE, raising(MachineError(reason)))
            case events.Refused(reason):
                self._output.message([f"ringrun: refused a connection: {reason}"])
            case events.RankEnded(end):
                self._on_end(self._losses.explained(end) if self._losses else end)
            case events.RankNotStarted(rank, host, reason):
                ranks.ends[rank] = RankEnd(rank, host, 0, 0, 0.0)
                ranks.running.discard(rank)
                self._end(shutdown.AFTER_FAILURE)
                text = f"rank {rank} on host {host} cannot execute the command: {reason}"
                self._conclusion = self._conclusion or raising(UsageError(text))
            case events.LauncherEnded() if self._losses and not ranks.missing:
                # a host may be lost, with the MPI's daemon there; the agents outlive mpirun
                self._output.message([f"ringrun: {self._launcher_end()}; the ranks continue without it"])
            case events.LauncherEnded():
                self._end(shutdown.AFTER_FAILURE)
            case events.Signalled(number) if number in self._job.forwarded:
                self._forward(number)
            case events.Signalled(signal.SIGUSR2):
                self._output.message(
                    ["ringrun: got SIGUSR2 and did nothing; --forward-signals USR2 passes it on to the ranks"]
                )
            case events.Signalled(signal.SIGUSR1):
                self._show_stacks("ringrun: what the ranks are doing:")
            case events.Signalled(number):
                self._on_signal(number)
            case events.HostsCame() if self._losses and self._shutdown is None:
                self._losses.announce(event)
            case events.HostLeft(host, lender):
                cut = self._job.lent_by(host, lender)
                self._without_slot.update(cut if lender != -1 else ())
                for rank in cut:
                    self._agents.cut(rank, f"`ringrun join` has ended on host {host}, which has left the job")
            case events.Reported(rank, report):
                self._on_report(rank, report)
            case events.StacksWanted(deliver):
                self._ask(lambda question: deliver(ranks.stacks(question)))
            case events.TotalsWanted(deliver, record_s):
                self._agents.broadcast(wire.Record(record_s))
                deliver(encode(self._collector.latest()))
            case events.Deaf(reason):
                self._end(shutdown.AFTER_TERMINATE, raising(MachineError(f"ranks can no longer be heard: {reason}")))
            case events.OutputClosed():
                self._end(shutdown.AFTER_TERMINATE, lambda: 128 + signal.SIGPIPE)

    def _on_report(self, rank: int, report: wire.Report) -> None:
        """Take what ringreduce, or the hook, in a rank says of it."""
        match report:
            case wire.Answer():
                self._questions.answer(rank, report)
            case wire.Stalled(stall):
                self._report_stall(rank, stall)
            case wire.InInit(report_after_s):
                self._joining.joined()
                self._init.wait(rank, report_after_s, time.monotonic())
            case wire.Initialized():
                self._joining.joined()  # with RINGREDUCE_STALL_CHECK_S=0 nothing was said before
                self._init.done(rank)
            case wire.Grouped(member, size):
                self._joining.grouped(rank, member, size)
            case wire.Alone():
                if text := self._joining.alone(rank, report):
                    self._last_words = [f"ringrun: {text}"]  # below what the ranks write
                if not report.ends:
                    self._say_last_words()
            case wire.Measured(text):
                self._collector.measured(rank, text)
            case wire.Finding(text):
                self._collector.note("findings", text, rank)
                self._ranks.findings.append(text)
            case wire.Notice(text):
                self._show_notice(rank, text)
            case wire.Left(why):
                self._init.inside.discard(rank)
                self._ranks.left[rank] = why
            case wire.Committed():
                self.scales_up = self._end(shutdown.AFTER_COMMIT, lambda: 1) or self.scales_up

    def _show_notice(self, rank: int, text: str) -> None:
        """Show what a rank says of the job, unless another one has said the same."""
        if len(self._notices) > _MOST_NOTICES:
            self._notices.clear()
        if self._notices.setdefault(text, rank) == rank:
            self._output.message([text])

    def _on_arrival(self, arrived: events.Arrived) -> None:
        """Let the ranks start when the last one is there."""
        ranks, rank = self._ranks, arrived.rank
        ranks.hosts[rank] = arrived.host
        ranks.missing.discard(rank)
        ranks.running.add(rank)
        if rank == 0 and not arrived.port:
            where = f"MASTER_PORT={self._job.master_port} is in use on {arrived.host}, where rank 0 would listen"
            why = f"{where}, or not allowed there"
            cure = "; set another, or unset it, and ringrun finds a free one"
            self._end(shutdown.AT_ONCE, raising(MachineError(why + cure)))
        if self._shutdown and self._shutdown.latest:
            self._agents.send(rank, wire.Signal(self._shutdown.latest))
        elif self._shutdown is None and not ranks.missing:
            self._start_deadline_s = self._progress_s = math.inf
            self._agents.set_up()

    def _on_end(self, end: RankEnd) -> None:
        """A failure ends a job that is not elastic."""
        self._ranks.ends[end.rank] = end
        self._collector.ended(end)
        if self._shutdown is None and end.failed and not end.blames:
            self._leave_out_host(end.rank)
        self._ranks.running.discard(end.rank)
        self._init.ended(end.rank, end.code, time.monotonic())
        if self._losses is None and end.failed:
            self._end(shutdown.AFTER_FAILURE)
        elif self._losses and self._shutdown:
            self._losses.report_late(end)

    def _go_on_or_end(self, why: str) -> None:
        """End an elastic job if there is a reason why it cannot go on."""
        if why and self._end(shutdown.AFTER_FAILURE):
            self._output.message([f"ringrun: the job cannot continue: {why}"])

    def _launcher_end(self) -> str:
        """How mpirun has ended, and who made it end, as far as it says so; MPICH says it on that rank's stderr."""
        how = f"{self._launcher.name} has ended with exit code {self._launcher.code}"
        who = outcome.aborted(self._launcher.tail)
        return f"{how}: {who}, which ends only that rank here; to end a rank, use sys.exit()" if who else how

    def _ask(self, deliver: Deliver = nobody) -> Question:
        """Ask all ranks that run what they do; `deliver` is called when they have answered, or have not in time."""
        question = self._questions.begin(self._ranks.running, time.monotonic(), deliver)
        for rank in question.asked:
            self._agents.send(rank, wire.Ask(question.number))
        return question

    def _show_stacks(self, headline: str) -> None:
        self._ask(lambda question: self._output.message([headline, *self._ranks.stacks(question)]))

    def _report_stall(self, rank: int, report: str) -> None:
        """Print a stall report of ringreduce's, and all ranks' stacks unless they were printed a short while ago.

        Where a rank has ended in the middle, none of the others can go on.
        """
        self._collector.note("stalls", f"rank {rank} says: {report}")
        if self._init.vanished and self._losses is None:
            self._end_without_vanished({rank})
            return
        now_s = time.monotonic()
        headline = f"ringrun: the job is stalled; rank {rank} says: {report}"
        if now_s < self._stacks_again_s:
            self._output.message([headline])
        else:
            self._stacks_again_s = now_s + _STACKS_INTERVAL_S
            self._show_stacks(headline)

    def _look_who_waits(self, asked: Question) -> None:
        if still := self._init.answer(asked.answers, time.monotonic()):
            self._end_without_vanished(still)

    def _end_without_vanished(self, waited: set[int]) -> None:
        conclusion = partial(self._conclusions.ended_with_0, self._init.vanished, waited, *WITHOUT_LEAVING)
        self._failed = self._end(shutdown.AFTER_FAILURE, conclusion) or self._failed

    def _report_init(self) -> None:
        """Ranks have waited for others in init(): end the job if one of those has ended, else say what these do."""
        late, gone = self._init.absent(self._ranks.ends)
        if gone:
            self._end(
                shutdown.AFTER_FAILURE,
                partial(self._conclusions.ended_with_0, gone, set(self._init.waiting), *WITHOUT_INIT),
            )
        elif late:
            waited = f"{numbered('rank', self._init.waiting)} waited {self._init.report_after_s:g} s in init() for"
            headline = f"ringrun: {waited} {numbered('rank', late)} of {self._job.size}, which did not call it:"
            self._ask(lambda asked: self._output.message([headline, *waiting(late & asked.asked, asked.answers)]))
        else:
            waited = f"{numbered('rank', self._init.waiting)} waited {self._init.report_after_s:g} s in init()"
            why = f"; {hint}" if (hint := network_hint(self._job)) else ""
            self._output.message([f"ringrun: {waited}, which all ranks have called{why}"])

    def _end(self, steps: Sequence[shutdown.Step], conclusion: Conclusion | None = None) -> bool:
        """Begin to end the job, and return True, unless its ending has begun."""
        if self._shutdown is not None:
            return False
        self._shutdown = shutdown.Shutdown(steps, time.monotonic(), self._job.grace_s)
        self._conclusion = conclusion
        if steps is shutdown.AFTER_FAILURE:  # as AFTER_TIMEOUT
            self._conclusions.at_end = self._ask()
        return True

    def _on_signal(self, number: int) -> None:
        self._was_signalled = True
        steps = shutdown.AFTER_INTERRUPT if number == signal.SIGINT else shutdown.AFTER_TERMINATE
        if not self._end(steps, lambda: 128 + number):
            self._shutdown = shutdown.Shutdown(shutdown.AT_ONCE, time.monotonic())
            return
        self.take_step()
        what = "interrupted" if number == signal.SIGINT else f"got {signal.Signals(number).name}"
        self._output.message([f"ringrun: {what}; ending {counted(len(self._ranks.running), 'rank')}"])

    def _forward(self, number: int) -> None:
        """Hand a signal to the ranks, which may save their state."""
        running, name = self._ranks.running, signal.Signals(number).name
        if self._ranks.missing:
            self._output.message([f"ringrun: got {name} before all ranks had started, so it was not passed on"])
            return
        for rank in running:
            self._agents.send(rank, wire.Signal(number, forwarded=True))
        self._output.message([f"ringrun: passed {name} on to {counted(len(running), 'rank')}"])

    def _end_launcher(self) -> None:
        """Let the agents go, and see mpirun's end."""
        self._conclusions.launcher_said = self._launcher.tail  # what it says from here on is our doing
        for rank in self._ranks.running:
            self._agents.send(rank, wire.Signal(signal.SIGKILL))
        self.keeps_commits = self._may_restart()
        self._agents.end_agents(wire.End(self.keeps_commits))
        self._launcher.end(_LAUNCHER_STEPS)
        self._agents.close()

    def _leave_out_host(self, rank: int) -> None:
        """Let restarts do without the host of a rank that has failed, for a while, if that is wanted."""
        host = self._job.host_of(rank)
        if self._job.hosts and self._blacklist and (cools_s := self._blacklist.failed(host)):
            why = f"since rank {rank} failed there (--blacklist-cooldown-range)"
            self._output.message([f"ringrun: restarts leave out host {host} for {cools_s:g} s, {why}"])

    def _may_restart(self) -> bool:
        """Return whether another attempt may follow, as far as is known before the end."""
        is_bad = self._shutdown is not None or any(end.failed for end in self._decisive_ends())
        return is_bad and (self.scales_up or self._job.restarts > 0) and not self._was_signalled

    def _conclude(self) -> int:
        """Print what there is to say, last of all, and return the exit code."""
        if self._conclusion:
            return self._conclusion()
        ends = self._decisive_ends()
        aborter = outcome.aborter(ends, self._launcher.code)
        left = () if self._job.elastic else self._ranks.left
        if cause := aborter or outcome.root_cause(ends, self._lost_peer_code, left):
            self._failed = True
            self._leave_out_host(cause.rank)
            return self._conclusions.failed(cause, ends)
        if self._shutdown is None:
            self._say_last_words()
            return 0
        self._failed = not self._ranks.missing
        return self._conclusions.launcher_ended()

    def _say_last_words(self) -> None:
        if self._last_words:
            self._output.message(self._last_words)
            self._last_words = []

    def _decisive_ends(self) -> list[RankEnd]:
        """Return the ends of all ranks but those without which the job has gone on."""
        recovered_from = self._losses.recovered_from if self._losses else ()
        return [end for rank, end in self._ranks.ends.items() if rank not in recovered_from]
