"""run() where an engine, such as Ray, Spark or Dask, has the machines: its tasks lend slots, and ranks run there.

    driver   run() ── ringrun join --lend 0 -np N    function, results, output, failure report, Ctrl-C: run_function.py
    task     lend() ── ringrun join HEAD --lend 1    one for each rank, or for several; it waits until the job has ended

An engine only has to start tasks that call `lend`. Ranks have their Python, folder, import path and variables.
"""

from __future__ import annotations

import numbers
import operator
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ringreduce.errors import InputError, StartupError

from . import run_function
from .errors import MachineError
from .job.plan import run_module
from .machine.topology import VISIBLE_VARIABLE
from .network import own_addresses
from .processes import how_ended, start_with_parent
from .run_function import FOLDER_VARIABLE, PATH_VARIABLE, PYTHON_VARIABLE

_JOINED = "has joined the job of"
_CONNECT_S = 2.0
_PAUSE_S = 0.2
_AGAIN_S = 10  # for a head that has just been reached
_KEY = "RINGRUN_KEY"
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, and its arguments."""


class Ticket(NamedTuple):
    """What a task needs to lend slots to a job; it travels as the task does."""

    addresses: tuple[str, ...]
    port: int
    key: str
    timeout_s: float


def check_seconds(timeout_s: Any) -> None:
    """Raise InputError for what is not how long tasks may take to begin."""
    if not (isinstance(timeout_s, numbers.Real) and float(timeout_s) > 0):
        what = "how long tasks may take to begin (timeout_s; in Spark start_timeout)"
        raise InputError(f"run(): {what}: expected a number of seconds above 0, got {timeout_s!r}")


def ticket(timeout_s: float) -> Ticket:
    """Return one for a job of this process, whose tasks may take so long to begin. StartupError without a network.

    To the MPI a task's host is another one, and Open MPI's launcher reaches none over the loopback.
    """
    check_seconds(timeout_s)
    try:
        addresses = own_addresses((), ())
    except MachineError as error:
        raise StartupError(f"run(): {error}, or use ringreduce.run(), whose ranks on this host need none") from error
    with socket.socket() as free:
        free.bind(("", 0))
        port: int = free.getsockname()[1]
    return Ticket(addresses, port, secrets.token_hex(32), timeout_s)


def run(
    call: Call,
    ticket: Ticket,
    np: int,
    flags: Mapping[str, Any],
    variables: Mapping[str, Any],
    trouble: Callable[[], str],
) -> list[Any]:
    """Do what `ringreduce.run` says, on `np` of the slots that tasks lend with this ticket.

    trouble: called several times a second from when tasks can join, and starts them at first: of a job that is refused
             there are none. Returns why they cannot lend, which ends a job without ranks, or nothing.
    """
    is_there = False

    def ask() -> str:
        nonlocal is_there
        is_there = is_there or bool(_look(ticket)[0])
        return trouble() if is_there else ""

    argv = ("join", f"localhost:{ticket.port}", "--lend=0", f"--join-timeout={ticket.timeout_s:g}", "--wdir=/")
    head = run_function.Head(argv, {_KEY: ticket.key}, ticket.addresses, ask)
    return run_function.on_ranks(call, {"np": np, **flags}, variables, sys.executable, head)


def lend(ticket: Ticket, slots: int = 1, gpus: str | None = None, wanted: Callable[[], bool] = lambda: True) -> str:
    """Lend slots of this host, with the GPUs that are visible, to a job until it has ended; return what was said.

    gpus:   as CUDA_VISIBLE_DEVICES lists them, if not those of this process.
    wanted: asked while there is no head; returns whether one can still come.

    Ranks here end with this thread, and with its process. RuntimeError where the job was not joined.
    """
    own = {_KEY: ticket.key, PYTHON_VARIABLE: sys.executable, FOLDER_VARIABLE: os.getcwd()}
    own[PATH_VARIABLE] = os.pathsep.join(filter(None, sys.path))
    if gpus is not None:
        own[VISIBLE_VARIABLE] = gpus
    head = f"{_reached(ticket, wanted)}:{ticket.port}"
    command = [sys.executable, *run_module("ringrun"), "join", head, f"--lend={slots}", f"--join-timeout={_AGAIN_S}"]
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = start_with_parent(command, signal.SIGKILL, (), env={**os.environ, **own}, **options)
    try:
        assert process.stderr
        with process.stderr:
            said = process.stderr.read().decode(errors="replace")
        code = process.wait()
    except BaseException:  # the engine ends the task
        process.kill()
        process.wait()
        raise
    if _JOINED not in said or run_function.REFUSES in said:  # it says that it has joined before the head takes it
        raise RuntimeError(f"`ringrun join` on {socket.gethostname()} {how_ended(code)}: {said.strip()}")
    return said


def _reached(ticket: Ticket, wanted: Callable[[], bool]) -> str:
    """Return the first of the head's addresses that can be reached from here; it may only just be starting."""
    until_s = time.monotonic() + ticket.timeout_s
    while True:
        address, why = _look(ticket)
        if address:
            return f"[{address}]" if ":" in address else address
        if not wanted():
            raise RuntimeError("the job ended before this task joined it")
        if time.monotonic() > until_s:
            where = f"the process that called run() cannot be reached from {socket.gethostname()}"
            raise RuntimeError(f"{where}: {why}; let its firewall pass TCP from there")
        time.sleep(_PAUSE_S)


def _look(ticket: Ticket) -> tuple[str, str]:
    """Return the first of the head's addresses at which it listens, if there is one, else why not."""
    why = ""
    for address in ticket.addresses:
        try:
            socket.create_connection((address, ticket.port), _CONNECT_S).close()
        except OSError as error:
            why = f"{address} port {ticket.port}: {error}"
        else:
            return address, ""
    return "", why


def call_of(where: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> Call:
    """Return what ranks are to call; InputError for arguments that are none."""
    if isinstance(args, str) or not isinstance(args, Iterable):
        raise InputError(f"{where}: args={args!r}: expected a tuple of the function's arguments, such as ({args!r},)")
    if not isinstance(kwargs, Mapping | None):
        raise InputError(f"{where}: kwargs={kwargs!r}: expected a dict of the function's arguments by name")
    return fn, tuple(args), dict(kwargs or {})


def count_of(what: str, number: Any) -> int:
    """Return a number of ranks, NumPy's too, as an int; InputError for what is none."""
    try:
        count = 0 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        count = 0
    if count < 1:
        raise InputError(f"{what}: expected a number of ranks, 1 or more, got {number!r}")
    return count


def checked(
    where: str, np: Any, limits: Mapping[str, Any], elastic: bool, flags: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[int, dict[str, Any]]:
    """Return how many ranks there are to be, and ringrun's flags; InputError for what cannot have been meant.

    limits: min_np and max_np, of an elastic job.
    names:  what flags are called here that have other names in Horovod, or in ringrun: those would count for ringrun
            alone, and not for how many tasks there are.
    """
    for name, here in names.items():
        if flags.get(name):
            raise InputError(f"{where}: {name}={flags[name]!r}: here it is {here}")
    for name in ("hosts", "hostfile", "host_discovery_script", "wdir"):
        if flags.get(name) is not None:
            raise InputError(f"{where}: {name}={flags[name]!r}: Ray, Spark or Dask places the ranks; leave it out")
    given = {name: limit for name, limit in limits.items() if limit is not None}
    for name, limit in given.items():
        if not elastic:
            raise InputError(f"{where}: {name}={limit!r} is for an elastic job; add elastic=True")
        given[name] = count_of(f"{where}: {name}", limit)
    return count_of(where, np), {**flags, "elastic": elastic or None, **given}
