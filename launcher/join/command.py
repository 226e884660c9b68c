"""ringrun join: one job of nodes that nobody can log in to.

    ringrun join --key-file ringrun.key python train.py
    ringrun join HEAD:PORT --nodes 4 --key-file ringrun.key python train.py

The same command on each of the nodes, as with torchrun. The node with index 0 is the head: it starts the ranks, on
itself and on the others, and prints what they write. Each node ends with the exit code of the job.

Which node is which is known from what the platform sets: NODE_RANK, NNODES, MASTER_ADDR and MASTER_PORT, as for
torchrun; or the variables of Slurm (one task on each node), of an Indexed Job or a JobSet of Kubernetes (with --nodes),
of Kubeflow's Trainer, AWS Batch, SageMaker or SkyPilot. Anywhere else, give HEAD:PORT (the head's name and a port on
it) and --nodes.

A node can also lend part of its host; then no node needs to be known in advance:

    ringrun join HEAD:PORT --lend 2 --key-file ringrun.key                          a part of a host, with its GPUs
    ringrun join localhost:PORT --lend 0 -np 8 --key-file ringrun.key python train.py      a head without ranks

All nodes need the same key, which nobody else knows: at least 32 characters, in a file that others cannot read, or in
the variable RINGRUN_KEY. All other flags are ringrun's; see ringrun --help.
"""

import contextlib
import os
import re
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence

from .. import cli
from ..arguments import Parser, parse_port, parse_seconds, whole
from ..cli import say
from ..config import resolve as config
from ..connection import wire
from ..connection.listener import Listener
from ..errors import LauncherError, MachineError, UsageError
from ..folders import private_folder
from ..forward import leave_batch_system
from ..hosts import MAX_SLOTS, Host, is_here, is_loopback
from ..machine.placement import automatic_size
from ..machine.topology import read_topology
from ..network import LOST_AFTER_S, own_addresses
from ..request import Joined, checked
from .head import Nodes, OverJoin
from .key import read_key
from .node import MORE_TIME, lend, own_node
from .platforms import MAX_NODES, OF_PLATFORM, NodeRank, find_node_rank

_USAGE = "ringrun join [HEAD:PORT] [--nodes N | --lend N] [--key-file FILE] [options] [command [arguments …]]"
_HEAD = re.compile(r"(?P<host>[\w.-]+|\[[\da-fA-F:.]+\]):(?P<port>\d+)")
_BACKLOG = 4096
_LOOPBACK = "127.0.0.1", "127.0.1.1"
_NOT_HERE = ("hosts", "hostfile", "host_discovery_script")


def _parser() -> Parser:
    parser = cli.parser("ringrun join", _USAGE, __doc__ or "")
    add = parser.group("Which nodes")
    add("--nodes", metavar="N", help="how many nodes there are, if no variable says so")
    lent = "lend N slots of this host; without a command, until the job ends; a head may lend 0"
    add("--lend", metavar="N", help=lent)
    add("--key-file", metavar="FILE", help="the key of the job (-: a line of standard input; else RINGRUN_KEY)")
    wait = "how long to wait for all nodes, and for the head (600)"
    add("--join-timeout", metavar="SECONDS", default="600", help=wait)
    parser.add_command()
    return parser


def run(arguments: Sequence[str]) -> int:
    """Do what `ringrun join` is asked for; returns the exit code. LauncherError where that cannot be done."""
    head = arguments[0] if arguments and _HEAD.fullmatch(arguments[0]) else ""
    resolved = config.resolve(_parser(), arguments[1:] if head else arguments, os.environ)
    return cli.run_resolved(resolved, lambda: _join(resolved, head))


def _join(resolved: config.Config, head: str) -> int:
    options = resolved.options
    timeout_s = parse_seconds(options.join_timeout, "--join-timeout")
    node_rank = _node_rank(head, options)
    lends_part = options.lend is not None and not options.command
    if node_rank.count > 1 and is_loopback(node_rank.head):
        why = f"{node_rank.head} means another host on each of {node_rank.count} nodes ({node_rank.why})"
        raise UsageError(f"{why}; expected the head's name or address as the others reach it")
    authkey = read_key(options.key_file, os.environ)
    _refuse_hosts(resolved)
    leave_batch_system(os.environ, OF_PLATFORM)  # ranks find other values there
    least = 1 if node_rank.index else 0
    said = options.lend and whole(options.lend, resolved.flag("lend"), least, MAX_SLOTS)
    slots = automatic_size(read_topology(os.environ)) if said is None else said
    if lends_part:
        node = own_node(node_rank.index, slots, lends_part=True)
        return lend(node_rank, authkey, node, timeout_s, parse_seconds(options.lost_after, resolved.flag("lost_after")))
    if node_rank.index:
        job = checked(resolved).job  # what is wrong is wrong everywhere
        return lend(node_rank, authkey, own_node(node_rank.index, slots, lends_part=False), timeout_s, job.lost_after_s)
    return _be_head(resolved, node_rank, authkey, slots, timeout_s)


def _node_rank(head: str, options: Namespace) -> NodeRank:
    if options.command and _HEAD.fullmatch(options.command[0]):
        raise UsageError(f"{options.command[0]}: HEAD:PORT must come before all flags: {_USAGE}")
    count = options.nodes and whole(options.nodes, "--nodes", 1, MAX_NODES)
    if match := _HEAD.fullmatch(head):
        lends_part = options.lend is not None and not options.command
        if not (count or lends_part or options.np != "auto"):
            raise UsageError(f"{head}: the number of nodes is unknown; add --nodes N, or -np N to wait for N slots")
        host = match["host"].strip("[]")
        index = 0 if is_here(Host(host)) and not lends_part else -1
        return NodeRank(index, count or 0, host, parse_port(match["port"], head), head)
    said = {"NNODES": options.nodes} if options.nodes else {}
    node_rank = find_node_rank({**os.environ, **said}, socket.getfqdn())
    if node_rank is None:
        raise UsageError(
            "nothing says which node this is; expected NODE_RANK, NNODES and MASTER_ADDR, or the variables of a "
            "platform that ringrun join --help names, or HEAD:PORT and --nodes N"
        )
    return node_rank


def _refuse_hosts(resolved: config.Config) -> None:
    for name in _NOT_HERE:
        if getattr(resolved.options, name):
            raise UsageError(f"{resolved.flag(name)}: the hosts of this job are the nodes that join; leave it out")


def _be_head(resolved: config.Config, node_rank: NodeRank, authkey: bytes, slots: int, timeout_s: float) -> int:
    """Wait for the nodes, run the job on them, and let them go."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until the job begins
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with private_folder() as directory:
        own = wire.Node(0, socket.gethostname(), slots)
        try:
            asked = checked(resolved)
            job = asked.job
            nodes = Nodes(_listener(directory, node_rank, authkey, job.interfaces, job.lost_after_s), directory, own)
        except LauncherError as error:
            say(f"ringrun: error: {error}")
            with contextlib.suppress(LauncherError):  # nor can the others be told
                Nodes(_listener(directory, node_rank, authkey), directory, own).release(
                    error.exit_code, node_rank.count
                )
            return error.exit_code
        code, late = 1, 0
        try:
            # the nodes of a platform are known, and how many there are; of others, the slots that the job needs
            elastic = job.elastic
            wanted, what, least = node_rank.count, "nodes", 1
            if not node_rank.count:
                least = elastic.min_np + elastic.spares if elastic else 1
                wanted, what = asked.np or least, "slots"
            found = nodes.await_all(wanted, timeout_s, what)
            have_joined = f"{found} of {wanted} {what} have joined within {timeout_s:g} s"
            if found < (least if elastic else wanted):
                why = f"see what ringrun has written on the others, or {MORE_TIME}"
                raise MachineError(f"{have_joined}; {why}")
            if elastic and what == "slots" and found < wanted:
                options = resolved.options
                options.np, options.max_np = str(found - elastic.spares), options.max_np or options.np
                say(f"ringrun: {have_joined}; the elastic job starts with these, and takes others that come")
            # else -np may be more than there are; new hosts of an elastic job get as many ranks as they have slots
            with_slots = (job.elastic is not None or not node_rank.count) and not resolved.options.slots_per_host
            sends = slots > 0  # a head without ranks is another kind of host: a notebook's, an engine's driver
            joined = Joined(
                lambda: nodes.found(with_slots=with_slots),
                lambda timeout_s: OverJoin(directory, timeout_s, lambda: nodes.there()[1], nodes.departures, sends),
            )
            code = cli.run_job(checked(resolved, joined))
        except LauncherError as error:
            say(f"ringrun: error: {error}")
            code, late = error.exit_code, node_rank.count
        except BaseException as error:
            code = getattr(error, "code", None) or code
            raise
        finally:
            nodes.release(code, late)
    return code


def _listener(
    directory: str,
    node_rank: NodeRank,
    authkey: bytes,
    interfaces: Sequence[str] = (),
    lost_after_s: float = LOST_AFTER_S,
) -> Listener:
    addresses, port = own_addresses((), interfaces), node_rank.port
    try:
        listener = Listener(directory, addresses, _BACKLOG, port=port, authkey=authkey, lost_after_s=lost_after_s)
    except OSError as error:
        what = f"port {port} of this host cannot be opened: {error.strerror}"
        raise MachineError(f"{what}; choose another one on all nodes: MASTER_PORT, or HEAD:PORT") from error
    for address in _LOOPBACK:  # where lenders on this host look that name it localhost, or as its /etc/hosts does
        with contextlib.suppress(OSError):  # another program listens there
            listener.listen(socket.create_server((address, port)), None)
    return listener
