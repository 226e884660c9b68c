"""ringrun: run a command as N ranks of one MPI job on this host.

    ringrun -np 4 python train.py --epochs 3

starts `python train.py --epochs 3` four times, with Open MPI or MPICH, whichever the mpi4py of that Python loads.
Everything after the command belongs to the command. It works as root and with more ranks than cores.

Definitions
  rank          one of the N processes, and its number, 0 to N-1
  local rank    its number among the ranks of its host

Environment of each rank
  RANK, WORLD_SIZE              its number, and how many there are
  LOCAL_RANK, LOCAL_WORLD_SIZE  the same on its host
  MASTER_ADDR, MASTER_PORT      where rank 0 may listen (a free port); kept if set
  OMP_NUM_THREADS               how many physical cores it has; kept if set (with --no-bind: the host's usable
                                hardware threads / local ranks, at least 1)
  PYTHONUNBUFFERED              1, so that lines appear when they are printed; kept if set
  RINGREDUCE_ERROR_FILE         where ringreduce leaves an uncaught exception for ringrun's report

How many ranks, and where they run
  -np N starts N ranks; -np auto, or no -np, one per NVIDIA GPU, or one per physical core where there is none.
  -H localhost:4 and --hostfile FILE (Open MPI's, MPICH's and Horovod's forms) name hosts and slots; in a Slurm, LSF or
  PBS allocation, or a pod of the MPI Operator, these are found. Slots are a limit, and without -np all get a rank.
  Ranks start on this host only: a host that is another one is an error.
  Each rank is bound to its own share of the cores that ringrun may use, hardware threads of one core together and on
  one NUMA node if possible. Where ranks outnumber cores each has one, in turn. --no-bind leaves them all to every rank.
  On a host with GPUs, local rank r belongs to GPU r (in turn, if ranks outnumber GPUs): its cores are near that GPU,
  and a line at the start tells who has what (without GPUs: with --verbose). GPUs are counted as CUDA does with
  CUDA_DEVICE_ORDER=PCI_BUS_ID, and CUDA_VISIBLE_DEVICES is heeded. All stay visible to every rank, which chooses its
  own by LOCAL_RANK. --mask-gpus chooses for it: CUDA_VISIBLE_DEVICES names its one GPU, which is then number 0.

Settings
  Each setting of ringreduce has a flag: --cycle-time-ms 5, --algorithm ring, --deterministic and --no-deterministic …
  `ringrun --show-config` lists them all, with their values and where each came from. They may stand in a file, too:
  --config-file job.yaml with lines such as `cycle_time_ms: 5`. A flag counts more than the file, the file more than
  a variable (RINGREDUCE_CYCLE_TIME_MS), a variable more than the default. horovodrun's flags and groups are
  understood; one that has no meaning here says so.

Output
  Each line is printed whole, behind the number of its rank: stdout on stdout, stderr on stderr. On a terminal the
  number has a colour (unless NO_COLOR is set) and a progress bar stays one line. Rank 0 reads
  ringrun's stdin unless that is a terminal; the others read nothing.
  --ranks 0,3-5     shows the lines of these ranks only, --quiet-ranks those of rank 0. When a hidden rank fails, the
                    report at the end shows its traceback, or the last that it wrote to stderr.
  --fold            shows a line that several ranks print at about the same time once, as `[0-3,7] text`. A line
                    waits up to 0.25 s for the other ranks; the lines of each rank keep their order.
  --output-filename DIR
                    also keeps all that a rank writes, shown or not, in DIR/rank.N/stdout and DIR/rank.N/stderr:
                    without prefixes, and progress bars with every frame. N has zeros in front where -np N needs them
                    (rank.07). Files that are there already are overwritten. A full disk does not end the job.
  --timestamps      puts the local time before each line (--prefix-output-with-timestamp is the same).

When a rank fails
  A rank that ends with 0 is done, and the others go on. The first that ends otherwise ends the job: the others
  get SIGTERM after half a second and SIGKILL two seconds later. The last thing printed names the rank that failed
  first, its host, its exit code and its traceback. In Python, an uncaught exception counts even while the other
  ranks wait for that rank in MPI.
  Ctrl-C gives every rank SIGINT, then 3 seconds, then SIGTERM and SIGKILL; a second Ctrl-C kills at once.
  No process is left behind, even if ringrun itself is killed.
  --timeout SECONDS ends a job that takes longer, like one whose rank has failed; the last line says which ranks ran.

Exit code
  0      every rank ended with 0
  n      the exit code of the rank that failed first; 128 + n if signal n ended it
  2      the command line is wrong, or the command cannot be run
  3      MPI is missing or does not start: mpi4py, the MPI library, or its mpirun
  124    the job took longer than --timeout
  130    Ctrl-C (143: SIGTERM; 129: SIGHUP; 141: nobody reads the output)
"""

import argparse
import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from . import config
from .engines.detect import detect, started_by
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
from .network import is_own_address, parse_interfaces
from .placement import automatic_size
from .plan import Job, example, find_command, interpreter_of
from .preflight import Preflight, check_job
from .ranks import parse_ranks
from .ssh import SshOptions, check_identity_file, parse_port
from .topology import read_topology

_USAGE = "ringrun [-np N] [options] command [arguments …]"
_EXAMPLE = "as in: ringrun -np 4 python train.py"

_SUBCOMMANDS = {"doctor": "doctor"}
"""First words that are no command to run, and the modules whose `run(arguments)` does them."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = _Parser(
        prog="ringrun",
        usage=_USAGE,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-np", metavar="N", default="auto", help="how many ranks to start; auto: one per GPU or core")
    parser.add_argument("-H", "--hosts", metavar="LIST", help="hosts and their slots, as in localhost:4")
    parser.add_argument("--hostfile", metavar="FILE", help="a file that names hosts and their slots")
    parser.add_argument("-p", "--ssh-port", metavar="PORT", help="where sshd listens on other hosts")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="the private key for other hosts")
    parser.add_argument("--network-interfaces", metavar="LIST", help="use these between hosts, as in eth0,ib0")
    parser.add_argument(
        "--start-timeout", metavar="SECONDS", default="30", help="so long hosts and ranks may take (30)"
    )
    parser.add_argument("--env", metavar="NAME[=VALUE]", action="append", help="give the ranks on all hosts a variable")
    parser.add_argument("--launcher", metavar="NAME", default="auto", help="in a Slurm job: auto, mpirun or srun")
    parser.add_argument("--no-bind", action="store_true", help="let each rank run on all cores")
    parser.add_argument("--mask-gpus", action="store_true", help="let each rank see its own GPU only")
    parser.add_argument("--dry-run", action="store_true", help="print the command that would be run, and do not run it")
    parser.add_argument("--verbose", action="store_true", help="show which MPI is used, and what mpirun itself prints")
    parser.add_argument("--ranks", metavar="LIST", help="show these ranks' lines only, as in 0,3-5")
    parser.add_argument("--quiet-ranks", action="store_true", help="show rank 0's lines only")
    parser.add_argument("--fold", action="store_true", help="show equal lines of several ranks once")
    parser.add_argument("--output-filename", metavar="DIR", help="also keep all output in DIR/rank.N/stdout and stderr")
    parser.add_argument(
        "--timestamps",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="put the local time before each line",
    )
    parser.add_argument("--timeout", metavar="SECONDS", help="end the job when it takes longer, with exit code 124")
    config.add_own_flags(parser)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("-h", "--help", action="help", help="print this manual and exit")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line and its file, checked.

    np (int, or None for auto), command (list), found (hosts and where they were named, or None), interfaces (names),
    ssh (SshOptions), asked (variables), timeout (seconds or None), start_timeout, mpi_args (list), the other
    flags; config: see config.py.
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
    if options.launcher not in ("auto", "mpirun", "srun"):
        raise UsageError(f"--launcher {options.launcher}: expected is auto, mpirun or srun")
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
    if not any(_is_elsewhere(host) for host in hosts):
        return None
    ways = {"ssh": options.ssh, "in_slurm": found.in_slurm, "interfaces": options.interfaces}
    return check_job(hosts, interpreter_of(command), command[0], **ways)


def _is_elsewhere(host: Host) -> bool:
    return not (is_here(host) or is_own_address(host.name))


def _tell(preflight: Preflight, verbose: bool) -> None:
    """Print what is worth knowing of the hosts that get ranks; MachineError if one cannot."""
    if verbose or preflight.errors:
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
        _tell(preflight.only([host.name for host, _ in hosts]), options.verbose)
    if hosts and options.found.in_slurm:
        detected = started_by(options.launcher, detected, [count for _, count in hosts])
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
    )
    if options.dry_run:
        print(example(detected, job, os.environ))
        return 0
    if options.verbose:
        print(f"ringrun: {detected.library.python} loads {detected.library.text}", file=sys.stderr)
        print(f"ringrun: running {example(detected, job, os.environ)}", file=sys.stderr)
        if secrets := withheld(os.environ, job.asked) if hosts else []:
            print(f"ringrun: other hosts do not get {', '.join(secrets)}; --env NAME sends one", file=sys.stderr)

    from .supervise import run_job  # not needed to tell what is wrong with a command line

    return run_job(detected, job)


def main() -> int:
    """Run as the console script `ringrun`."""
    try:
        return run(sys.argv[1:])
    except LauncherError as error:
        print(f"ringrun: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # before the job has begun
        return 130
