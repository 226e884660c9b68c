"""What ringrun says when all processes of a job are gone, and its exit code."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..errors import LauncherError, MachineError, NotStartedError
from ..output.display import Output
from ..report import outcome
from ..report.answers import stacks_report, waiting
from ..report.card import card
from ..report.outcome import RankEnd
from ..run_report import Collector
from ..text import listed, numbered, was
from .mpirun import MpiLauncher
from .plan import Job
from .questions import Question, nobody

WITHOUT_INIT = "without calling init(), where", "for all ranks"
WITHOUT_LEAVING = "in mid-training (as os._exit(0) does) while", "for it"
_TIMEOUT_EXIT_CODE = 124  # that of timeout(1)

Conclusion = Callable[[], int]
"""Prints or raises what there is to say when all is over; returns ringrun's exit code."""


@dataclass
class Ranks:
    """Where the ranks of a job stand, as far as ringrun has heard."""

    job: Job
    hosts: dict[int, str] = field(default_factory=dict)  # of those that have arrived
    missing: set[int] = field(init=False)  # those that have not
    running: set[int] = field(default_factory=set)
    left: dict[int, str] = field(default_factory=dict)  # why, of those that have left in order
    ends: dict[int, RankEnd] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)  # of --check

    def __post_init__(self) -> None:
        self.missing = set(range(self.job.size))

    @property
    def missing_hosts(self) -> list[str]:
        """The hosts of those that have not arrived, each once."""
        return list(dict.fromkeys(map(self.job.host_of, sorted(self.missing))))

    def stacks(self, question: Question) -> list[str]:
        """What they have answered to the question what they do."""
        return stacks_report(question.asked, question.answers, self.job.size, self.hosts)


class Conclusions:
    """Those of one job; each method is one, for its own reason why the job has ended."""

    def __init__(self, ranks: Ranks, launcher: MpiLauncher, output: Output, collector: Collector) -> None:
        self._collector = collector
        self._ranks = ranks
        self._launcher = launcher
        self._output = output
        self.launcher_said: list[str] = []  # before ringrun ended it
        self.at_end = Question(0, frozenset(), 0.0, nobody)  # what ranks that still ran did when the job began to end

    def failed(self, cause: RankEnd, ends: Sequence[RankEnd]) -> int:
        """A rank failed, and is the cause; `ends` are those of all ranks that count."""
        job, asked, answers = self._ranks.job, self.at_end.asked, self.at_end.answers
        left = {} if job.elastic else self._ranks.left  # in an elastic job the others go on without those
        said = self.launcher_said
        found = self._ranks.findings
        shown = partial(
            card, cause, ends, job.size, found=found, asked=asked, answers=answers, left=left, launcher_tail=said
        )
        self._collector.card = shown()
        self._output.message([*_advice(cause, job, said), *shown(colour=self._output.colours)])
        return outcome.exit_code(cause)

    def took_too_long(self, running: set[int], missing: set[int]) -> int:
        """The time was over when the ranks `running` ran and the ranks `missing` had not arrived."""
        job = self._ranks.job
        stacks = self._ranks.stacks(self.at_end)
        self._say([*stacks, outcome.timeout_report(job.timeout_s or 0.0, running, missing, job.size)])
        return _TIMEOUT_EXIT_CODE

    def started_too_slowly(self) -> int:
        """The time for the start was over."""
        raise MachineError(
            self._not_started(f"the {self._ranks.job.start_timeout_s:g} s of --start-timeout had passed")
        )

    def ended_with_0(self, gone: set[int], waited: set[int], how: str, whom: str) -> int:
        """The ranks `gone` ended with 0 while others `waited` for them."""
        job = self._ranks.job
        lines = [
            f"ringrun: {numbered('rank', gone)} of {job.size} ended with exit code 0 {how} "
            f"{numbered('rank', waited)} {was(waited)} waiting {whom}, so the job was ended:"
        ]
        lines += waiting(waited, self.at_end.answers)
        if "-" in job.command[1:]:
            lines.append(f"only rank {job.stdin_rank} reads ringrun's stdin; a script for all ranks must be in a file")
        self._say(lines)
        return 1

    def launcher_ended(self) -> int:
        """The launcher, as mpirun, ended, and no rank had failed."""
        name, code = self._launcher.name, self._launcher.code
        if self._ranks.missing:
            raise NotStartedError(self._not_started(f"{name} ended with exit code {code}"))
        what = f"ringrun: {name} ended with exit code {code} before the ranks did; it wrote:"
        self._say([what, "\n".join(self._launcher.tail)])
        return code if code and code > 0 else 1

    def _say(self, lines: list[str]) -> None:
        self._collector.card = lines
        self._output.message(lines)

    def _not_started(self, what: str) -> str:
        """Return which ranks had not come to life, and on which hosts; none had begun the command."""
        ranks, said = self._ranks, "\n".join(self.launcher_said) or "(nothing)"
        return (
            f"{what} when {len(ranks.hosts)} of {ranks.job.size} ranks had started; missing: "
            f"{numbered('rank', ranks.missing)} on {listed(ranks.missing_hosts)}; "
            f"{self._launcher.name} wrote:\n{said}"
        )


def raising(error: LauncherError) -> Conclusion:
    """Return a conclusion that raises `error`: the job cannot run as the user wants it."""

    def conclude() -> int:
        raise error

    return conclude


_OF_TORCH = {"in notebook_launcher": "notebook_launcher", "ProcessRaisedException": "mp.spawn"}
"""Who starts processes that make a process group of their own, by what is then in a traceback."""


_NO_NETWORK = re.compile(
    r"[Uu]nable to connect to the peer|connect\(\) to \S+ failed|ucx.*Destination is unreachable|OFI call \w+ failed"
)
"""What the MPIs write where they try a network that does not lead to another host."""


def network_hint(job: Job) -> str:
    """Return which networks the MPI may have tried in vain, and the cure; nothing where there is one host."""
    if not (found := job.machines.networks(host.name for host, _ in job.hosts)):
        return ""
    cure = f"name one that does: --network-interfaces {found[0].split()[0]}"
    return f"perhaps one of these networks does not connect all hosts ({listed(found)}): {cure}"


def _advice(cause: RankEnd, job: Job, launcher_said: Sequence[str]) -> list[str]:
    """Return what to do about a failure whose traceback does not say it."""
    if any(map(_NO_NETWORK.search, (*cause.tail, *launcher_said))) and (hint := network_hint(job)):
        return [f"ringrun: {hint}"]
    size, rank, traceback = job.size, cause.rank, cause.error.traceback if cause.error else ""
    raised = cause.error.exception if cause.error else " ".join(cause.tail[-1:])
    if "BdbQuit" in raised:
        return [f"ringrun: to debug rank {rank} here, give it this terminal: ringrun --stdin {rank} …"]
    starter = next((name for sign, name in _OF_TORCH.items() if sign in traceback), None)
    if starter is None or size == 1 or not ("init_process_group" in traceback or "TCPStore" in traceback):
        return []
    cure = f"instead of {starter}, call the function that it was given, once in each rank"
    return [
        f"ringrun: {starter} starts more processes in rank {rank}, though ringrun has started all {size} ranks; {cure}"
    ]
