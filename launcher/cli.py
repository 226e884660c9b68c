"""ringrun: run a command as N ranks of one MPI job.

    ringrun -np 4 python train.py --epochs 3     start `python train.py --epochs 3` four times
    ringrun doctor -H h1,h2                      check hosts and the links between them
    ringrun stacks [JOB]                         list jobs, or show what a job's ranks do
    ringrun manifest -h                          print a job for Kubernetes' MPI Operator

It uses Open MPI or MPICH, whichever the mpi4py of that Python loads. What follows the command
belongs to it. A rank is one of the N processes, and its number; its local rank is its number on
its host. README.md tells more of everything.

Environment of a rank
  RANK, WORLD_SIZE                its number, and how many there are
  LOCAL_RANK, LOCAL_WORLD_SIZE    the same on its host
  MASTER_ADDR, MASTER_PORT        where rank 0 may listen; kept if set
  OMP_NUM_THREADS                 how many cores it has; kept if set
  PYTHONUNBUFFERED                1, so that lines appear when they are printed; kept if set
  RINGREDUCE_RESTART_COUNT        how often --restarts has started the job again, 0 at first

Exit code
  0    every rank ended with 0
  n    that of the rank that failed first; 128 + n if signal n ended it
  2    the command line is wrong, or the command cannot be run
  3    this machine, or another host, lacks something: mpi4py, the MPI library, or its mpirun
  124  the job took longer than --timeout
  130  Ctrl-C (143: SIGTERM; 129: SIGHUP; 141: nobody reads the output)
"""

import argparse
import importlib
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from .config import resolve as config
from .engines.detect import by_srun, detect
from .errors import LauncherError, UsageError
from .forward import parse_env, withheld
from .hosts import (
    Host,
    assign,
    expand_nodelist,
    find_allocation,
    is_here,
    parse_host_list,
    read_hostfile,
    read_text,
)
from .job.plan import Job, example, find_command, interpreter_of
from .job.restarts import Again, on_hosts_that_answer
from .machine.placement import automatic_size
from .machine.topology import read_topology
from .network import is_own_address, parse_interfaces
from .preflight import Preflight, check_job
from .ranks import parse_ranks
from .ssh import SshOptions, check_identity_file, parse_port

_MOST_DIGITS = 10
_COLUMNS = 100  # of the manual

_WHERE = """\
Without -np there are as many ranks as slots on the hosts of -H, of --hostfile, or of an
allocation of Slurm, LSF, PBS or the MPI Operator; else one per NVIDIA GPU, or per physical core.
Other hosts are reached over ssh, or through Slurm. Each rank is bound to cores of its own; local
rank r has GPU r, and cores near it."""

_WHILE = """\
A line is printed whole, behind its rank: [3] text. Rank 0 reads stdin, unless it is a terminal."""

_FAILS = """\
The first rank that does not end with 0 ends the job: the others get SIGTERM after half a second
and SIGKILL two seconds later. A report comes last: rank, host, exit code, traceback. Ctrl-C gives
SIGINT and three seconds; a second one kills at once. No process is left behind."""

_SETTINGS = """\
Each setting of ringreduce is a flag, --log-level debug, a line of a file, `log_level: debug`, and
a variable, RINGREDUCE_LOG_LEVEL; the first of them counts. horovodrun's are understood, too."""

_USAGE = "ringrun [-np N] [options] command [arguments …]"
_EXAMPLE = "as in: ringrun -np 4 python train.py"

_SUBCOMMANDS = {"doctor": "doctor", "stacks": "stacks", "manifest": "kubernetes.manifest"}
"""First words that are no command to run, and the modules whose `run(arguments)` does them."""


class _Manual(argparse.RawDescriptionHelpFormatter):
    """As wide as the manual's text, with `-p, --ssh-port PORT` for `-p PORT, --ssh-port PORT`, as since Python 3.13."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=_COLUMNS)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {action.metavar}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    introduction, heading, tables = __doc__.partition("Environment of a rank")
    parser = _Parser(
        prog="ringrun",
        usage=_USAGE,
        description=introduction,
        epilog=heading + tables,
        formatter_class=_Manual,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument_group("Where ranks go", _WHERE).add_argument
    add("-np", metavar="N", default="auto", help="how many ranks to start; auto: as without it")
    add("-H", "--hosts", metavar="LIST", help="hosts and their slots, as in localhost:4")
    add("--hostfile", metavar="FILE", help="a file of them, as Open MPI, MPICH or Horovod have it")
    add("-p", "--ssh-port", metavar="PORT", help="where sshd listens on other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the private key for other hosts")
    add("--network-interfaces", metavar="LIST", help="use these between hosts, as in eth0,ib0")
    add(
        "--launcher",
        metavar="NAME",
        default="mpirun",
        help="in a Slurm job: mpirun, which does it through Slurm, or srun",
    )
    add("--no-bind", action="store_true", help="let each rank run on all cores")
    add("--mask-gpus", action="store_true", help="let each rank see its own GPU only, as number 0")
    add("--mpi-args", metavar='"…"', help='more arguments for mpirun: --mpi-args="-v"')
    add = parser.add_argument_group("While it runs", _WHILE).add_argument
    add("--ranks", metavar="LIST", help="show these ranks' lines only, as in 0,3-5")
    add("--quiet-ranks", action="store_true", help="show rank 0's lines only")
    add("--fold", action="store_true", help="show equal lines of several ranks once: [0-3,7] text")
    add("--prefix-output-with-timestamp", dest="timestamps", action="store_true", help=argparse.SUPPRESS)  # Horovod's
    add("--timestamps", action="store_true", help="put the local time before each line")
    add("--output-filename", metavar="DIR", help="also keep all output, in DIR/rank.N/stdout and stderr")
    add("--timeout", metavar="SECONDS", help="end the job when it takes longer, restarts included")
    add = parser.add_argument_group("When it fails", _FAILS).add_argument
    add("--start-timeout", metavar="SECONDS", default="30", help="so long hosts and ranks may take (30)")
    add("--restarts", metavar="N", default="0", help="after a failure run the job again, up to N times")
    settings = parser.add_argument_group("Settings", _SETTINGS)
    config.add_own_flags(settings)
    settings.add_argument(
        "--env", metavar="NAME[=VALUE]", action="append", help="give the ranks on all hosts a variable"
    )
    add = parser.add_argument_group("What ringrun itself does").add_argument
    add("--dry-run", action="store_true", help="print the command that would be run, and do not run it")
    add("--verbose", action="store_true", help="show which MPI is used, and what mpirun itself prints")
    add("--version", action="store_true", help="print the version and exit")
    add("-h", "--help", action="help", help="print this manual and exit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line and its file, checked.

    np (int, or None for auto), command (list), found (hosts and where they were named, or None), interfaces (names),
    ssh (SshOptions), asked (variables), timeout (seconds or None), start_timeout, restarts (int), mpi_args (list), the
    other flags; config: see config.py.
    """
    resolved = config.resolve(_parser(), arguments, os.environ)
    options = resolved.options
    options.config = resolved
    options.mpi_args = config.split_mpi_args(options.mpi_args, resolved.place("mpi_args"))
    if options.version or options.show_config or options.check_build:
        return options
    options.np = _rank_count(options.np, resolved.place("np"))
    options.found = _named_hosts(options)
    options.interfaces = parse_interfaces(options.network_interfaces)
    options.timeout = _seconds(options.timeout, f"{resolved.place('timeout')}--timeout")
    options.start_timeout = _seconds(options.start_timeout, f"{resolved.place('start_timeout')}--start-timeout")
    options.ssh = _ssh_options(options)
    options.asked = parse_env(options.env or (), os.environ)
    if options.launcher not in ("mpirun", "srun"):
        raise UsageError(f"--launcher {options.launcher}: expected is mpirun or srun")
    options.restarts = _times(options.restarts, f"{resolved.place('restarts')}--restarts")
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        raise UsageError(f"no command to run, {_EXAMPLE}")
    return options


def _rank_count(text: str, place: str) -> int | None:
    if text == "auto":
        return None
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"{place}-np {text}: neither a whole number nor auto") from None
    if count < 1:
        raise UsageError(f"{place}-np {text}: at least 1 rank is needed")
    return count


@dataclass(frozen=True)
class Found:
    """The hosts that the user or a batch system names."""

    hosts: Sequence[Host]
    why: str
    """Where they were named."""
    in_slurm: bool
    """They belong to a Slurm job that ringrun runs in, and Slurm starts processes there."""


def _named_hosts(options: argparse.Namespace) -> Found | None:
    """Return the hosts that were named, if any were."""
    _refuse_being_many(os.environ)
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("-H and --hostfile exclude each other; give one of them")
    if options.hosts is not None:
        hosts, why = parse_host_list(options.hosts), f"-H {options.hosts}"
    elif options.hostfile is not None:
        hosts, why = read_hostfile(options.hostfile), f"--hostfile {options.hostfile}"
    else:
        allocation = find_allocation(os.environ, read_text)
        return Found(allocation.hosts, allocation.why, allocation.kind == "slurm") if allocation else None
    nodelist = os.environ.get("SLURM_JOB_NODELIST")
    nodes = expand_nodelist(nodelist) if nodelist else []
    return Found(hosts, why, all(host.name in nodes for host in hosts))


def _refuse_being_many(environ: Mapping[str, str]) -> None:
    """Raise UsageError if srun has started ringrun once for every rank."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "SLURM_STEP_ID" in environ and tasks not in ("", "0", "1"):
        raise UsageError(
            f"srun has started ringrun {tasks} times (SLURM_STEP_NUM_TASKS={tasks}), and each would start all ranks; "
            "start it once, in the batch script or in salloc, without srun before it"
        )


def _ssh_options(options: argparse.Namespace) -> SshOptions:
    port = None if options.ssh_port is None else parse_port(options.ssh_port, "--ssh-port")
    key = options.ssh_identity_file
    key = None if key is None else check_identity_file(key, "--ssh-identity-file")
    return SshOptions(port, key, options.start_timeout / 2)  # so that ssh can say what it waits for


def _placement(
    options: argparse.Namespace, slots_of: Callable[[Host], int] | None = None
) -> tuple[int, Sequence[tuple[Host, int]]]:
    """Return how many ranks there are and, if some go to other hosts, which host gets how many, in order.

    slots_of:  how many ranks a host gets whose slots nobody has said; by default as many as this one would.
    """
    here = automatic_size(read_topology(os.environ))
    if options.found is None:
        return options.np or here, ()
    assigned = assign(options.found.hosts, options.np, slots_of or (lambda host: here))
    size = sum(count for _, count in assigned)
    return size, assigned if any(_is_elsewhere(host) for host, _ in assigned) else ()


def _preflight(options: argparse.Namespace, command: Sequence[str]) -> Preflight | None:
    """Ask the hosts that may get ranks what they have, if there are others among them."""
    found = options.found
    if found is None or options.dry_run:
        return None
    slots_are_said = all(host.slots is not None for host in found.hosts)
    hosts = [host for host, _ in assign(found.hosts, options.np, lambda host: 1)] if slots_are_said else found.hosts
    return _ask(options, command, hosts) if any(_is_elsewhere(host) for host in hosts) else None


def _ask(options: argparse.Namespace, command: Sequence[str], hosts: Sequence[Host]) -> Preflight:
    ways = {"ssh": options.ssh, "in_slurm": options.found.in_slurm, "interfaces": options.interfaces}
    return check_job(hosts, interpreter_of(command), command[0], **ways)


def _again(options: argparse.Namespace, command: Sequence[str]) -> Again:
    """Return what finds the hosts for a restart."""

    def answering(names: Sequence[str]) -> Collection[str]:
        asked = _ask(options, command, [Host(name) for name in names])
        return set(asked.answering) - {finding.host for finding in asked.errors}

    return on_hosts_that_answer(options.found.hosts if options.found else (), answering)


def _is_elsewhere(host: Host) -> bool:
    return not (is_here(host) or is_own_address(host.name))


def _tell(preflight: Preflight) -> None:
    """Print what the hosts that get ranks have told; MachineError if one cannot run any."""
    print(preflight.table(), file=sys.stderr, flush=True)
    for line in preflight.warning_lines():
        print(f"ringrun: warning: {line}", file=sys.stderr, flush=True)
    preflight.require_no_errors()


def _shown_ranks(text: str | None, quiet: bool, size: int, place: str) -> frozenset[int] | None:
    if text is not None and quiet:
        raise UsageError("--ranks and --quiet-ranks exclude each other: --quiet-ranks is --ranks 0")
    if quiet:
        return frozenset([0])
    return None if text is None else parse_ranks(text, size, f"{place}--ranks")


def _seconds(text: str | None, flag: str) -> float | None:
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise UsageError(f"{flag} {text}: not a number of seconds") from None
    if not 0 < seconds < math.inf:
        raise UsageError(f"{flag} {text}: expected is a number of seconds above 0")
    return seconds


def _times(text: str, flag: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < _MOST_DIGITS else -1
    if number < 0:
        raise UsageError(f"{flag} {text}: expected is how often, a whole number of 0 or more")
    return number


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says and return the exit code; LauncherError when that cannot be done."""
    if arguments and arguments[0] in _SUBCOMMANDS:
        subcommand = importlib.import_module(f".{_SUBCOMMANDS[arguments[0]]}", __package__)
        code: int = subcommand.run(arguments[1:])
        return code
    options = parse(arguments)
    if options.version:
        from importlib.metadata import version  # slow to import, and seldom needed

        print(f"ringrun {version('ringreduce')}")
        return 0
    for notice in options.config.notices:
        print(f"ringrun: {notice}", file=sys.stderr, flush=True)
    if options.show_config:
        print(options.config.table())
        return 0
    if options.check_build:
        from .build import build_table  # imports ringreduce

        print(build_table(sys.executable))
        return 0
    command = find_command(options.command)
    detected = detect(interpreter_of(command))
    preflight = _preflight(options, command)
    size, hosts = _placement(options, preflight.automatic_size if preflight else None)
    if preflight:
        _tell(preflight.only([host.name for host, _ in hosts]))
    if hosts and options.found.in_slurm and options.launcher == "srun":
        detected = by_srun(detected)
    job = Job(
        size,
        command,
        verbose=options.verbose,
        bind=not options.no_bind,
        mask_gpus=options.mask_gpus,
        mpi_args=options.mpi_args,
        variables=options.config.variables,
        shown=_shown_ranks(options.ranks, options.quiet_ranks, size, options.config.place("ranks")),
        fold=options.fold,
        timestamps=options.timestamps,
        output_directory=options.output_filename,
        timeout_s=options.timeout,
        start_timeout_s=options.start_timeout,
        hosts=hosts,
        ssh=None if options.found and options.found.in_slurm else options.ssh,
        interfaces=options.interfaces,
        asked=options.asked,
        restarts=options.restarts,
    )
    if options.dry_run:
        print(example(detected, job, os.environ))
        return 0
    if options.verbose:
        print(f"ringrun: {detected.library.python} loads {detected.library.text}", file=sys.stderr)
        print(f"ringrun: running {example(detected, job, os.environ)}", file=sys.stderr)
        if secrets := withheld(os.environ, job.asked) if hosts else []:
            print(f"ringrun: other hosts do not get {', '.join(secrets)}; --env NAME sends one", file=sys.stderr)

    from .job.run import run_job  # not needed to tell what is wrong with a command line

    return run_job(detected, job, _again(options, command))


def main() -> int:
    """Run as the console script `ringrun`."""
    try:
        return run(sys.argv[1:])
    except LauncherError as error:
        print(f"ringrun: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the job has begun
        return 130
