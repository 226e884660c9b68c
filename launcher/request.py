"""What a command line and its file ask for, checked: a job, before its command and its ranks' hosts are found."""

import os
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from . import elastic
from .arguments import (
    parse_port,
    parse_rank_count,
    parse_seconds,
    parse_signals,
    parse_start_timeout,
    parse_times,
    split_words,
    whole,
)
from .config.resolve import Config
from .errors import UsageError
from .folders import absolute
from .forward import parse_allowed, parse_env
from .hosts import MAX_SLOTS, Found, named_hosts, parse_host_list, without
from .job.plan import Job
from .network import parse_interfaces
from .remote import Reach, reach_of
from .run_report import LOOPBACK, require_prometheus
from .ssh import parse_ssh

_ADDRESS = re.compile(r"\[[^\[\]]+\]|[^:\[\]]*")  # before a port


@dataclass(frozen=True)
class Request:
    """The command line and its file, checked."""

    config: Config
    job: Job
    """What was asked for, before the command, hosts and the number of ranks are found."""
    np: int | None
    """How many ranks, spares included; None: found out from the hosts."""
    found: Found | None
    """The hosts that were named; None: this one."""
    find_hosts: Callable[[], Found | None]
    """Returns those that are named now: a file may have changed."""

    @property
    def options(self) -> Namespace:
        """ringrun's own flags."""
        return self.config.options


class Joined(NamedTuple):
    """The hosts of a job of `ringrun join`, and how they are reached, which may take a time in seconds."""

    hosts: Callable[[], Found]
    reach: Callable[[float], Reach]


def checked(resolved: Config, joined: Joined | None = None) -> Request:
    """Return what the command line and its file say; UsageError for what is wrong in them."""
    options, flag = resolved.options, resolved.flag
    if options.launcher not in ("mpirun", "srun"):
        raise UsageError(f"{flag('launcher')}: expected mpirun or srun, got {options.launcher!r}")
    if options.hosts and options.hostfile and bool(resolved.place("hosts")) != bool(resolved.place("hostfile")):
        setattr(options, "hosts" if resolved.place("hosts") else "hostfile", None)  # the command line's counts
    if not options.command:
        raise UsageError("no command to run, as in: ringrun -np 4 python train.py")
    find_hosts = _host_finder(resolved, joined)
    found = find_hosts()
    job = _job(resolved, found, joined)
    np = parse_rank_count(options.np, flag("np"))
    if np and job.elastic:
        np += job.elastic.spares
    return Request(resolved, job, np, found, find_hosts)


def _host_finder(resolved: Config, joined: Joined | None) -> Callable[[], Found | None]:
    """Return what finds the hosts, with the slots that --slots-per-host gives those without a number."""
    options, flag = resolved.options, resolved.flag
    script = split_words(options.host_discovery_script, flag("host_discovery_script"))
    slots = options.slots_per_host and whole(options.slots_per_host, flag("slots_per_host"), 1, MAX_SLOTS)
    place = resolved.place("hosts") or resolved.place("hostfile") or resolved.place("host_discovery_script")

    out = options.exclude and parse_host_list(options.exclude, flag("exclude"))
    may_be_gone = bool(script)  # it prints others each time

    def find_hosts() -> Found | None:
        nonlocal may_be_gone
        found = joined.hosts() if joined else named_hosts(options.hosts, options.hostfile, place, script)
        if not found:
            if out:
                raise UsageError(f"{flag('exclude')}: no hosts are named, by -H, by --hostfile or by a batch system")
            return None
        hosts = [replace(host, slots=host.slots or slots) for host in found.hosts]
        names = {host.name for host in hosts}
        excluded = [host for host in out or () if not may_be_gone or host.name in names]
        may_be_gone = True  # from a file that has changed
        return replace(found, hosts=without(hosts, excluded, flag("exclude")) if excluded else hosts)

    return find_hosts


def _job(resolved: Config, found: Found | None, joined: Joined | None) -> Job:
    options, flag = resolved.options, resolved.flag
    start_timeout_s = parse_start_timeout(
        options.start_timeout, flag("start_timeout"), len(found.hosts) if found else 0
    )
    lost_after_s = parse_seconds(options.lost_after, flag("lost_after"))
    asked = parse_env(options.env or (), os.environ)
    elasticity = elastic.parse(options, flag, {**os.environ, **resolved.variables, **asked})
    if elasticity and joined:
        elasticity = replace(elasticity, takes_hosts=True)
    metrics = _metrics(options.metrics_port, flag("metrics_port"))
    # half of it, so that ssh can say what it waits for
    ssh = parse_ssh(options.ssh_port, options.ssh_identity_file, start_timeout_s / 2, lost_after_s)
    return Job(
        0,
        options.command,
        verbose=options.verbose,
        bind=not options.no_bind,
        mask_gpus=options.mask_gpus,
        mpi_args=split_words(options.mpi_args, flag("mpi_args")),
        variables={**resolved.variables, **({"RINGREDUCE_REPORT": "1"} if options.report or metrics else {})},
        fold=options.fold,
        timestamps=options.timestamps,
        output_directory=options.output_filename,
        report_directory=options.report,
        metrics=metrics,
        folder=options.wdir and absolute(options.wdir),
        timeout_s=None if options.timeout is None else parse_seconds(options.timeout, flag("timeout")),
        start_timeout_s=start_timeout_s,
        lost_after_s=lost_after_s,
        gives_terminal=options.stdin is not None,
        restarts=parse_times(options.restarts, flag("restarts")),
        grace_s=None if options.grace is None else parse_seconds(options.grace, flag("grace")),
        forwarded=parse_signals(options.forward_signals, flag("forward_signals")),
        elastic=elasticity,
        reach=joined.reach(ssh.connect_timeout_s) if joined else reach_of(found, ssh),
        interfaces=parse_interfaces(options.network_interfaces, flag("network_interfaces")),
        asked=asked,
        allowed=parse_allowed(options.env_allow, flag("env_allow")),
        master_port=_master_port({**os.environ, **asked}),
    )


def _master_port(environ: Mapping[str, str]) -> int:
    """Return the port that the user has set, 0 where none is; UsageError for what is no port."""
    text = environ.get("MASTER_PORT", "")
    return parse_port(text, "MASTER_PORT") if text else 0


def _metrics(text: str | None, flag: str) -> tuple[str, int] | None:
    """Return the address and the port at which metrics are served; None for nowhere."""
    if text is None:
        return None
    address, _, port = text.rpartition(":")
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"{flag} {text}: expected an IPv6 address in brackets, as in [::1]:9400")
    where = address.strip("[]") or LOOPBACK, parse_port(port, flag, least=0)
    require_prometheus()
    return where
