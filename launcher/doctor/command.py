"""ringrun doctor: what the hosts have, how fast the links between them are, and what to do about what is wrong.

    ringrun doctor -H n1,n2,n3

It asks every host what a job needs of it (Python, ringreduce, mpi4py, NumPy, MPI, GPUs, clock, /dev/shm) and prints
one table. Then one rank on each host reduces a buffer with every other, two by two, and it prints bandwidth and latency
of all links. `*` marks what differs, is missing or is slow; what to do about it is printed below the table. Hosts with
an error are not measured.

    ringrun doctor -H n1,n2,n3 --gradients 500 --computing 0.3

also estimates how long a training step would take there with each way of sending less (Compression.int8 …), for a step
with these seconds of computing and MB of float32 gradients.

Without -H or --hostfile the hosts are those of the Slurm, LSF or PBS job, or of the MPI Operator; otherwise only this
host.

Exit code: 0, also with warnings; 3 with errors; 2 for a wrong command line.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ..arguments import Parser, add_host_flags, parse_positive, parse_seconds, parse_start_timeout
from ..errors import MachineError, UsageError
from ..hosts import Found, Host, named_hosts
from ..job.plan import run_module
from ..network import parse_interfaces
from ..preflight import check_job
from ..remote import Reach, reach_of
from ..ssh import parse_ssh
from ..text import counted
from .links import Links, findings, matrix, read_links, rounds

_USAGE = "ringrun doctor [-H LIST | --hostfile FILE] [options]"


_PACKAGE = __package__.partition(".")[0]
_ROUND_S = 15.0
_GRACE_S = 30.0
_SHOWN_LINES = 12


@dataclass(frozen=True)
class Request:
    """The command line, checked."""

    found: Found
    reach: Reach
    interfaces: Sequence[str]
    flags: Sequence[str]
    """Those of it that the measuring job gets, too."""
    step: tuple[float, float] | None = None
    """Of a training step: MB of gradients, and seconds of computing."""


def _parser() -> Parser:
    parser = Parser("ringrun doctor", _USAGE, __doc__)
    add = parser.group("Options")
    add_host_flags(add)
    add("--gradients", metavar="MB", help="gradients of a training step, in float32: 4 bytes per parameter")
    add("--computing", metavar="S", help="seconds of a training step on one rank alone")
    add("-h", "--help", action="help", help="print this manual and exit")
    return parser


def parse(arguments: Sequence[str]) -> Request:
    """Return the command line, checked; UsageError for what cannot be."""
    options = _parser().parse_args(arguments)
    found = named_hosts(options.hosts, options.hostfile) or Found([Host("localhost")], "", in_slurm=False)
    timeout_s = parse_start_timeout(options.start_timeout, "--start-timeout", len(found.hosts))
    lost_after_s = parse_seconds(options.lost_after, "--lost-after")
    ssh = parse_ssh(options.ssh_port, options.ssh_identity_file, timeout_s, lost_after_s)
    given = vars(options) | {"start_timeout": f"{timeout_s:g}"}
    names = ("start_timeout", "lost_after", "ssh_port", "ssh_identity_file", "network_interfaces")
    flags = [part for name in names if given[name] for part in (f"--{name.replace('_', '-')}", given[name])]
    step = _step(options.gradients, options.computing)
    return Request(found, reach_of(found, ssh), parse_interfaces(options.network_interfaces), flags, step)


def _step(gradients: str | None, computing: str | None) -> tuple[float, float] | None:
    if gradients is None and computing is None:
        return None
    if gradients is None or computing is None:
        raise UsageError(
            "--gradients and --computing describe a training step together, as in: --gradients 500 --computing 0.3"
        )
    return parse_positive(gradients, "--gradients", "MB"), parse_seconds(computing, "--computing")


def run(arguments: Sequence[str]) -> int:
    """Do what `ringrun doctor` is asked for; returns the exit code. LauncherError where that cannot be done."""
    request = parse(arguments)
    hosts = request.found.hosts
    print(f"ringrun: asking {counted(len(hosts), 'host')} …", file=sys.stderr, flush=True)
    preflight = check_job(hosts, sys.executable, reach=request.reach, interfaces=request.interfaces)
    print(preflight.table(), flush=True)
    _print_findings("Errors", preflight.error_lines())
    _print_findings("Warnings", preflight.warning_lines())
    failed = {finding.host for finding in preflight.errors}
    sound = [host.name for host in hosts if host.name not in failed]
    links, failure = _links(request, sound)
    if links is not None:
        print(f"\n{matrix(links)}")
        _print_findings("Links", findings(links))
        if request.step and links.measured:
            print(f"\n{_ways(*request.step, links)}")
    if failure:
        print(f"\nSome links could not be measured; the job that measures them ended with:\n{failure}")
    errors = len(preflight.error_lines()) + bool(failure)
    warnings = len(preflight.warning_lines()) + (len(findings(links)) if links else 0)
    print(f"\n{counted(errors, 'error')}, {counted(warnings, 'warning')}")
    return MachineError.exit_code if errors else 0


def _links(request: Request, sound: Sequence[str]) -> tuple[Links | None, str]:
    """Measure the links between the hosts without errors; returns them, and why not all are there."""
    if len(request.found.hosts) < 2:
        print("\nOne host: there is no link to measure. Name several with -H n1,n2 or --hostfile.")
        return None, ""
    if len(sound) < 2:
        print("\nThe links are not measured: that requires two hosts without errors.")
        return None, ""
    print(f"ringrun: measuring the links between {len(sound)} hosts …", file=sys.stderr, flush=True)
    timeout_s = request.reach.timeout_s + _ROUND_S * len(rounds(len(sound)))
    lines, failure = measure(job_of(sound, request.flags, timeout_s), timeout_s)
    links = read_links(lines, sound)
    return (links if links.links else None), failure


def job_of(hosts: Sequence[str], flags: Sequence[str], timeout_s: float) -> list[str]:
    """Return the argv of the job that measures, one rank on each host: ringrun itself; `flags` are its own."""
    slots = ",".join(str(Host(name, 1)) for name in hosts)
    own = ["-np", str(len(hosts)), "-H", slots, "--timeout", f"{timeout_s:g}", "--no-bind", *flags]
    worker = [sys.executable, *run_module(f"{_PACKAGE}.doctor.worker")]
    return [sys.executable, *run_module(_PACKAGE), *own, *worker]


def measure(job: Sequence[str], timeout_s: float) -> tuple[list[str], str]:
    """Run the job to its end; return its ranks' lines, and if it failed, how.

    It is a process of its own, since a job prints on stdout, and here its lines are figures.
    """
    with subprocess.Popen(
        job, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s + _GRACE_S)
        finally:
            process.terminate()  # it ends its ranks
    if not process.returncode:
        return stdout.splitlines(), ""
    # the lines that ringrun's own error begins with; where there is none, the last ones
    lines = [line for line in stderr.splitlines() if line.strip()]
    begin = next((at for at, line in enumerate(lines) if line.startswith("ringrun: error:")), -_SHOWN_LINES)
    failure = "\n".join(lines[begin:][:_SHOWN_LINES])
    return stdout.splitlines(), failure or f"exit code {process.returncode}"


def _ways(gradients_mb: float, computing_s: float, links: Links) -> str:
    """Return what a training step would take over the slowest link."""
    from .wire_cost import costs, table

    gbit_s = min(link.gbit_s for link in links.measured)
    rows = costs(gradients_mb * 1e6, computing_s, len(links.hosts), gbit_s)
    step = f"A step of {computing_s:g} s of computing and {gradients_mb:g} MB of gradients"
    return f"{step}, over {gbit_s:.3g} Gbit/s between {len(links.hosts)} hosts:\n{table(rows)}"


def _print_findings(title: str, lines: Sequence[str]) -> None:
    if lines:
        print("\n".join([f"\n{title}:", *(f"  {line}" for line in lines)]), flush=True)
