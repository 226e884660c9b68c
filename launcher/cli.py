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
import os
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

from .config import resolve as config
from .engines.detect import by_srun, detect
from .errors import LauncherError, UsageError
from .forward import parse_env, withheld
from .hosts import Host
from .job.plan import Job, example, find_command, interpreter_of
from .job.restarts import Again, on_hosts_that_answer
from .network import parse_interfaces
from .preflight import Preflight, check_job
from .quantities import parse_rank_count, parse_seconds, parse_times
from .ranks import parse_ranks
from .ssh import parse_ssh
from .where import may_get_ranks, named_hosts, place_ranks

_COLUMNS = 100  # of the manual

_WHERE = """\
Without -np there are as many ranks as slots on the hosts of -H, of --hostfile, or of an
allocation of Slurm, LSF, PBS or the MPI Operator; else one per NVIDIA GPU, or per physical core.
Other hosts are reached over ssh, or through Slurm; before ranks start, a table tells what they
have. Each rank is bound to cores of its own; local rank r has GPU r, and cores near it."""

_WHILE = """\
A line is printed whole, behind its rank: [3] text. Rank 0 reads stdin, unless it is a terminal."""

_FAILS = """\
The first rank that does not end with 0 ends the job: the others get SIGTERM after half a second
and SIGKILL two seconds later. A card comes last: rank, host, signal or exit code, traceback, what
the others waited for. A job that hangs says what its ranks do: by itself, or at `ringrun stacks`,
or SIGUSR1. Ctrl-C gives SIGINT and three seconds; a second one kills at once. No process is left."""

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
    other flags; config: see config/resolve.py.
    """
    resolved = config.resolve(_parser(), arguments, os.environ)
    options = resolved.options
    options.config = resolved
    options.mpi_args = config.split_mpi_args(options.mpi_args, resolved.place("mpi_args"))
    if options.version or options.show_config or options.check_build:
        return options
    options.np = parse_rank_count(options.np, f"{resolved.place('np')}-np")
    for one, other in (("hosts", "hostfile"), ("ranks", "quiet_ranks")):
        resolved.settle(one, other)
    place = resolved.place("hosts") or resolved.place("hostfile")
    options.found = named_hosts(options.hosts, options.hostfile, place)
    options.interfaces = parse_interfaces(
        options.network_interfaces, f"{resolved.place('network_interfaces')}--network-interfaces"
    )
    if options.timeout is not None:
        options.timeout = parse_seconds(options.timeout, f"{resolved.place('timeout')}--timeout")
    options.start_timeout = parse_seconds(options.start_timeout, f"{resolved.place('start_timeout')}--start-timeout")
    # half of it, so that ssh can say what it waits for
    options.ssh = parse_ssh(options.ssh_port, options.ssh_identity_file, options.start_timeout / 2)
    options.asked = parse_env(options.env or (), os.environ)
    if options.launcher not in ("mpirun", "srun"):
        raise UsageError(f"--launcher {options.launcher}: expected is mpirun or srun")
    options.restarts = parse_times(options.restarts, f"{resolved.place('restarts')}--restarts")
    if options.command[:1] == ["--"]:
        del options.command[0]
    if not options.command:
        raise UsageError(f"no command to run, {_EXAMPLE}")
    return options


def _preflight(options: argparse.Namespace, command: Sequence[str]) -> Preflight | None:
    """Ask the hosts that may get ranks what they have, if there are others among them."""
    if options.found is None or options.dry_run:
        return None
    hosts = may_get_ranks(options.found, options.np)
    return _ask(options, command, hosts) if hosts else None


def _ask(options: argparse.Namespace, command: Sequence[str], hosts: Sequence[Host]) -> Preflight:
    ways = {"ssh": options.ssh, "in_slurm": options.found.in_slurm, "interfaces": options.interfaces}
    return check_job(hosts, interpreter_of(command), command[0], **ways)


def _again(options: argparse.Namespace, command: Sequence[str]) -> Again:
    """Return what finds the hosts for a restart."""

    def answering(names: Sequence[str]) -> Collection[str]:
        asked = _ask(options, command, [Host(name) for name in names])
        return set(asked.answering) - {finding.host for finding in asked.errors}

    return on_hosts_that_answer(options.found.hosts if options.found else (), answering)


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
        print(options.config.table(), flush=True)
        return 0
    if options.check_build:
        from .build import build_table  # imports ringreduce

        print(build_table(sys.executable))
        return 0
    command = find_command(options.command)
    detected = detect(interpreter_of(command))
    preflight = _preflight(options, command)
    size, hosts = place_ranks(options.found, options.np, preflight.automatic_size if preflight else None)
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
        master_port={**os.environ, **options.asked}.get("MASTER_PORT", ""),
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
    except BrokenPipeError:  # nobody reads on, as in `ringrun --show-config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's end would complain
        return 141
