"""The preflight of a job: asks its hosts over ssh or through Slurm, and whether they can connect to this one."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from ..hosts import Host
from ..network import own_addresses
from ..reach import reach_over_slurm, reach_over_ssh
from ..ssh import SshOptions
from .check import Preflight, check

_BACKLOG = 1024


def check_job(
    hosts: Sequence[Host],
    python: str,
    command: str | None = None,
    *,
    ssh: SshOptions,
    in_slurm: bool,
    interfaces: Sequence[str] = (),
) -> Preflight:
    """Ask this host and all `hosts`; returns what they have and what is wrong. See `check` for the rest.

    ssh:         also says how long a host may take, whichever way leads there.
    in_slurm:    the hosts are nodes of the Slurm job that ringrun runs in.
    interfaces:  those of this host that the others are to connect to; empty: whichever work.
    """
    timeout_s = ssh.connect_timeout_s
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ringrun-preflight-"))
        reach = reach_over_slurm(timeout_s) if in_slurm else reach_over_ssh(directory, ssh)
        addresses: list[tuple[str, int]] = []
        if others := [host.name for host in hosts if not reach.is_here(host.name)]:
            port = stack.enter_context(_listener()).getsockname()[1]
            addresses = [(address, port) for address in own_addresses(others, interfaces)]
        return check(hosts, reach, python, command, addresses=addresses, timeout_s=timeout_s)


def _listener() -> socket.socket:
    """Return a socket that takes connections to any address of this host; the kernel answers them."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", 0), backlog=_BACKLOG)
