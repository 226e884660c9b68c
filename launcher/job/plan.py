"""What will be started: the user's command, found, and the command line around it. Pure but for the file system."""

import difflib
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..connection.wire import AUTHKEY_VARIABLE
from ..elastic import Elastic, rank_variables
from ..engines import Across
from ..engines.detect import Detected
from ..environment import AGENT_VARIABLES, Settings
from ..errors import UsageError
from ..forward import forwarded, settings_of_job, withheld
from ..hosts import HOSTFILE_VARIABLES, Host, Machines, is_here, is_loopback
from ..network import LOST_AFTER_S
from ..remote import OverSsh, Reach
from ..text import EMPTY

_AGENT = "ringrun.agent"
_BEFORE_PYTHON = ("PYTHONPATH", "LD_LIBRARY_PATH")
"""What an agent's Python may need to start at all."""

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?t?")
_FLAG_OF_PYTHON = re.compile(
    r"-[bBdEhiIJOPqRsStuvVx?3]*([cmWX].*)?|--(help(-\w+)?|version|check-hash-based-pycs)(=.*)?"
)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_OF_SHELLS = ("cd", "exec", "export", "source", "ulimit")  # commands that are no programs
_ALIKE = 0.6


def run_module(module: str, version: tuple[int, int] = sys.version_info[:2]) -> list[str]:
    """Return what makes a Python of this version run `module`, as `-m` does, whose arguments follow.

    The current folder must not be on its path: a file of the user's may be called like a module that is imported.
    """
    if version >= (3, 11):
        return ["-P", "-m", module]
    return ["-c", f"import runpy, sys; del sys.path[0]; runpy.run_module({module!r}, run_name='__main__')"]


def find_command(command: Sequence[str], own: Collection[str] = ()) -> list[str]:
    """Return `command` with its program as an absolute path, found as a shell would; UsageError if it is not there.

    own: the names of ringrun's own commands, of which one may have been meant.

    mpirun may change PATH for the ranks; the program is the one that the user's own shell would run. A bare `python` is
    ringrun's own where it would be none, or one beside an environment that is not activated.
    """
    name, *arguments = command
    path = shutil.which(name)
    if name in ("python", "python3") and (path is None or _is_not_activated(os.environ)):
        path = sys.executable
    if path is None:
        raise UsageError(f"command not found: {name!r}{_why_not_found(name, own)}")
    if _PYTHON.fullmatch(Path(name).name):
        _refuse_flags_of_ringrun(name, arguments)
    return [os.path.abspath(path), *arguments]


def _refuse_flags_of_ringrun(python: str, arguments: Sequence[str]) -> None:
    """Raise UsageError for a flag behind `python` that no Python has: each rank would print Python's usage."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return
        if (found := _FLAG_OF_PYTHON.fullmatch(word)) is None:
            raise UsageError(
                f"{word} comes after {python}, which has no such flag; ringrun's own flags come first: "
                f"ringrun {word} … {python} …"
            )
        if (option := found[1] or "")[:1] in ("c", "m"):
            return
        if option in ("W", "X") or word == "--check-hash-based-pycs":
            next(words, None)


def _is_not_activated(environ: Mapping[str, str]) -> bool:
    """Return whether ringrun was started by its path in an environment, and the shell is in none."""
    in_environment = sys.prefix != sys.base_prefix
    on_path = os.path.dirname(sys.executable) in environ.get("PATH", "").split(os.pathsep)
    return in_environment and not on_path and not any(environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX"))


def _why_not_found(name: str, own: Collection[str]) -> str:
    if not name:
        return f" ({EMPTY})"
    if os.path.isdir(name):
        return " (it is a folder)"
    if _PYTHON.fullmatch(name):
        return f"; ringrun's own is {sys.executable}: name that, or activate its environment"
    if not os.path.exists(name):
        if name == "help":
            return "; ringrun --help prints the manual"
        if assigned := _ASSIGNMENT.match(name):
            return f"; to set a variable for the ranks: ringrun … --env {assigned[0]}… COMMAND"
        if " " in name:
            return "; a program and its arguments are several words: leave out the quotes, or write sh -c '…'"
        if name in _OF_SHELLS:
            return "; only shells have it: ringrun … sh -c '…'"
        meant = difflib.get_close_matches(name, own, 1, _ALIKE)
        return f"; did you mean ringrun {meant[0]} …?" if meant else ""
    if name.endswith(".py"):
        return f" (it is a file here; to run it: ringrun … python {name})"
    return " (it is a file here, but not executable)" if os.sep in name else f" (to run the file here: ./{name})"


def interpreter_of(command: Sequence[str]) -> str:
    """Return the Python that knows which MPI the command needs: its own if it is one, else ringrun's."""
    return command[0] if _PYTHON.fullmatch(Path(command[0]).name) else sys.executable


@dataclass(frozen=True)
class Job:
    """What the user has asked for."""

    size: int
    """How many ranks."""
    command: Sequence[str]
    """What each of them runs; its program found."""
    verbose: bool = False
    bind: bool = True
    """Each rank has cores of its own."""
    mask_gpus: bool = False
    """Each rank sees its own GPU only."""
    mpi_args: Sequence[str] = ()
    """More arguments for mpirun."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """For all ranks, in addition to ringrun's own."""
    shown: frozenset[int] | None = None
    """The ranks whose lines are printed; None: all."""
    fold: bool = False
    """Equal lines of several ranks are printed once."""
    timestamps: bool = False
    output_directory: str | None = None
    """Where files keep what the ranks write."""
    appends: bool = False
    """They keep what they held before."""
    report_directory: str | None = None
    """Where the run report is written."""
    metrics: tuple[str, int] | None = None
    """The address and the port, 0 for any, at which metrics are served."""
    folder: str | None = None
    """Where the ranks start, an absolute path; None: in ringrun's current folder."""
    timeout_s: float | None = None
    """Of all attempts together."""
    restarts: int = 0
    """How often the job may be run again after a failure."""
    grace_s: float | None = None
    """How long ranks have between the first signal that ends them and SIGKILL; None: as shutdown.py says."""
    forwarded: frozenset[int] = frozenset()
    """Signals to ringrun that the ranks get."""
    elastic: Elastic | None = None
    """How ranks go on without others; None: they do not."""
    commits_folder: str = ""
    """Where the ranks of an elastic job keep commits on each host, in memory, for a restart; empty: they do not."""
    start_timeout_s: float = 30.0
    """How long all ranks may take to start."""
    lost_after_s: float = LOST_AFTER_S
    """A host that is silent for longer is lost."""
    open_files: int = 0
    """How many files the ranks on this host may have open; 0: as many as ringrun."""
    stdin_rank: int = 0
    """Which rank reads ringrun's stdin."""
    gives_terminal: bool = False
    """It reads it even where that is a terminal."""
    hosts: Sequence[tuple[Host, int]] = ()
    """The hosts, in the order of their ranks, and how many each gets; empty: all ranks are on this host."""
    machines: Machines = field(default_factory=Machines)
    """What is known of these hosts, and of those that come."""
    reach: Reach = field(default_factory=OverSsh)
    """How the other hosts are reached."""
    interfaces: Sequence[str] = ()
    """The network interfaces to use; empty: whichever work."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Variables that --env wants the ranks on all hosts to have, secrets too."""
    allowed: Sequence[str] = ("*",)
    """Names and patterns of the other variables that ranks on other hosts may have."""
    master_port: int = 0
    """The MASTER_PORT that the user has set; 0 if there is none."""

    def host_of(self, rank: int) -> str:
        """Return the name of the host that `rank` is to start on."""
        return self.place_of(rank)[0]

    def place_of(self, rank: int) -> tuple[str, int, int]:
        """Return the same, its number there, and how many are there."""
        for host, count in self.hosts:
            if rank < count:
                return host.name, rank, count
            rank -= count
        return socket.gethostname(), rank, self.size

    def lent_by(self, name: str, lender: int) -> range:
        """Return the ranks on the host of this name, or of them those on the slots of this lender, if it is not -1."""
        begin = 0
        for host, count in self.hosts:
            if host.name == name:
                if lender == -1:
                    return range(begin, begin + count)
                first = 0
                for number, slots in host.lenders:
                    if number == lender:
                        return range(begin + min(first, count), begin + min(first + slots, count))
                    first += slots
            begin += count
        return range(0)


def aliases(job: Job) -> dict[str, str]:
    """Return names for other hosts' IPv6 addresses, which no MPI's launcher accepts; ssh maps them back."""
    addresses = [host.name for host, _ in job.hosts if ":" in host.name and not is_here(host)]
    return {f"ringrun-host-{number}": address for number, address in enumerate(addresses)}


def across(job: Job, inherited: Mapping[str, str], directory: str) -> Across | None:
    """Return what a launcher must know of the job's hosts, if there are others; ringrun's `directory` is for files."""
    if not job.hosts:
        return None
    sent = _BEFORE_PYTHON if job.reach.sends_environment else ()
    names = [*AGENT_VARIABLES, *(name for name in sent if name in inherited)]
    names_of = {address: name for name, address in aliases(job).items()}
    rsh, address = job.reach.rsh(directory), job.reach.address
    called = [host.name for host, _ in job.hosts if host.name not in names_of] if rsh else []  # srun has its own names
    own = [name for name in called if ":" in name or is_loopback(name)]
    names_of |= dict.fromkeys(own, socket.gethostname())  # by which the MPI's launcher knows that no ssh is needed
    ranks = [(Host(names_of.get(host.name, host.name)), count) for host, count in job.hosts]
    if rsh and not address:
        address = job.machines.address(host.name for host, _ in job.hosts if not is_here(host))
    return Across(ranks, rsh, names, address, job.interfaces, job.lost_after_s)


def job_command(detected: Detected, job: Job, beyond: Across | None, *, as_root: bool) -> list[str]:
    """Return the argv that starts the job's agents; what each of them is to start it hears from ringrun."""
    program = [sys.executable, *run_module(_AGENT)]
    argv = detected.engine.command(detected.launcher, job.size, program, as_root=as_root, across=beyond)
    return [*_without(argv[: -len(program)], job.mpi_args), *job.mpi_args, *program]


def _without(argv: Sequence[str], mpi_args: Sequence[str]) -> list[str]:
    """Return `argv` without the placement that the user gives too: mpirun refuses a flag that stands there twice."""
    users = {argument.lstrip("-") for argument in mpi_args if argument.startswith("-")}
    twice = [at for at, flag in enumerate(argv) if flag in ("--map-by", "--bind-to") and flag.lstrip("-") in users]
    return [argument for at, argument in enumerate(argv) if at not in twice and at - 1 not in twice]


def engine_variables(detected: Detected, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the engine wants and the user has not set."""
    wanted = detected.engine.environment(detected.launcher.path)
    return {name: value for name, value in wanted.items() if name not in inherited}


def job_environment(
    detected: Detected, job: Job, inherited: Mapping[str, str], settings: Settings, authkey: bytes
) -> dict[str, str]:
    """Return the environment of mpirun, and through it of the agents; beyond this host no secrets leave with it."""
    wanted, key = engine_variables(detected, inherited), {AUTHKEY_VARIABLE: authkey.hex()}
    ours = {**job.variables, **job.asked, **wanted, **settings.to_environment(), **key}
    scratch = detected.engine.scratch(detected.launcher, settings.directory, inherited)
    if not job.hosts or job.reach.rsh(settings.directory):  # else the launcher starts its daemons by Slurm
        scratch |= detected.engine.without_allocation()
    inherited = {name: value for name, value in inherited.items() if name not in HOSTFILE_VARIABLES}
    if not job.hosts:
        return {**scratch, **inherited, **ours}
    stay = withheld(inherited, job.asked, job.allowed)
    return (
        scratch
        | {name: value for name, value in inherited.items() if name not in stay}
        | ours
        | {**job.reach.environment}
    )


def elastic_variables(detected: Detected, job: Job, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the ranks of an elastic job, and not for mpirun."""
    if job.elastic is None:
        return {}
    environ = {**inherited, **job.variables, **job.asked}
    of_engine = detected.engine.elastic_environment(detected.launcher, environ, is_across=bool(job.hosts))
    return rank_variables(job.elastic, of_engine, environ)


def local_variables(job: Job, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that agents on this host are sent: those that mpirun does not get."""
    stay = withheld(inherited, job.asked, job.allowed) if job.hosts else []
    return {name: inherited[name] for name in (*stay, *HOSTFILE_VARIABLES) if name in inherited}


def remote_variables(job: Job, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that agents on other hosts are sent, out of mpirun's `environment`."""
    if not job.hosts:
        return {}
    if not job.reach.sends_environment:
        return {**settings_of_job(environment), **job.asked}
    return forwarded(environment, job.asked, gpus_are_chosen=job.reach.gpus_are_chosen)


def network_variables(detected: Detected, job: Job, inherited: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the variables by which the MPI on each host leaves out interfaces that lead to no other one."""
    engine, environ = detected.engine, {**inherited, **job.variables, **job.asked}
    if job.interfaces or engine.has_chosen_network(detected.launcher, environ, job.mpi_args):
        return {}
    machines, names = job.machines, [host.name for host, _ in job.hosts]
    return {name: engine.network_environment(machines.interfaces(name), machines.rdma(name)) for name in names}


def example(detected: Detected, job: Job, inherited: Mapping[str, str]) -> str:
    """Return the command that starts the job's agents, as a shell would take it; nothing is written."""
    directory = "/tmp/ringrun-…"  # noqa: S108 - stands for a private directory
    variables = {**job.variables, **engine_variables(detected, inherited)}
    beyond = across(job, inherited, directory)
    if beyond:
        variables |= detected.engine.across_environment(beyond)
    return printable(job_command(detected, job, beyond, as_root=os.geteuid() == 0), variables)


def printable(argv: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return `argv` with `variables` set for it, quoted for a shell."""
    assignments = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    return shlex.join([*assignments, *argv])
