"""What `init()` makes and `shutdown()` ends: one Runtime per process; `current()` returns it."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import dataclasses
import functools
import gc
import hashlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringreduce import log
from ringreduce._version import __version__
from ringreduce.engine.engine import Engine
from ringreduce.errors import InputError, MismatchError, NotInitializedError, StalledError
from ringreduce.execution.algorithms import fitted, usable_algorithms
from ringreduce.execution.host import Host
from ringreduce.execution.signature import Signature, SubmissionRecord, calling_line, mismatch_message
from ringreduce.gpu import device_selection
from ringreduce.monitor import excepthook, stalls
from ringreduce.monitor.launcher_link import StatusServer, report_init, report_leaving
from ringreduce.mpi import finalize_mpi, mpi_library
from ringreduce.negotiation.negotiation import GLOBAL
from ringreduce.settings import PER_RANK, Settings, horovod_notice
from ringreduce.startup import clock, worlds
from ringreduce.startup.shared_memory import prepare_host
from ringreduce.startup.worlds import Elastic
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.threads import ThreadTransport
from ringreduce.world import World, form_world

LEAVE_S = 2.0  # how long a rank of an elastic job that has ended waits for the others to end


class Runtime:
    """A world, its transport, the settings, and the engine, which it starts."""

    def __init__(
        self,
        world: World,
        transport: MessageTransport | ThreadTransport,
        settings: Settings,
        host: Host,
        clock_offsets_us: Sequence[float] = (),
        process_sets: Sequence[Sequence[int] | str] = (),
        gpu: device_selection.Choice = device_selection.NOT_ASKED,
        elastic: Elastic | None = None,
    ) -> None:
        """elastic: None: the job is not."""
        self.gpu, self.settings, self.elastic = gpu, settings, elastic
        self._has_warned = False  # that ranks hang in shutdown()
        self.enter(world, transport, host, clock_offsets_us, process_sets)
        if elastic is None:
            self._status_server = StatusServer(settings.error_file, self.engine.activity.waiting_for)
        else:
            self._status_server = elastic.server
            elastic.server.waiting_for = lambda: self.engine.activity.waiting_for()

    def enter(
        self,
        world: World,
        transport: MessageTransport | ThreadTransport,
        host: Host,
        clock_offsets_us: Sequence[float],
        process_sets: Sequence[Sequence[int] | str],
    ) -> None:
        """Begin a world; of an elastic job, after the one before was given up."""
        self.world, self.transport = world, transport
        self.engine = Engine(world, transport, self.settings, host, clock_offsets_us, process_sets)
        self.engine.gpu.default_index = self.gpu.index or 0
        if self.elastic is not None:
            self.elastic.watch(world, self.engine.give_up)

    def close(self) -> None:
        """Free what `start` made; every rank must call it. Raises StalledError: see `_check_wait`."""
        try:
            if self.elastic is not None:
                return  # ranks may be lost at any moment, and could not take part
            self.engine.gpu.close()
            self.world.meet(self._check_wait)  # other ranks may have mapped this GPU memory
            self.engine.gpu.free()
            self.world.free()
        finally:
            self._status_server.close()

    def _check_wait(self, waited_s: float) -> None:
        """Report ranks that said that they leave, but do not, after `stall_check_s`; raise after `stall_abort_s`."""
        check_s, abort_s = self.settings.stall_check_s, self.settings.stall_abort_s
        is_over = 0 < abort_s <= waited_s
        if not (is_over or 0 < check_s <= waited_s):
            return
        stopped = "a rank that has called it, too, is stopped, or in C code that holds the interpreter"
        text = f"rank {self.world.rank} has waited in shutdown() for {waited_s:.0f} s; {stopped}"
        if not self._has_warned:
            self._has_warned = True
            stalls.warn(self.settings, text)
        if is_over:
            raise StalledError(text)


_process_runtime: Runtime | None = None
_process_id = 0
_generations = 0
_is_elastic = False  # then lost ranks could not take part in MPI_Finalize
_gpu = device_selection.NOT_ASKED
_parents_world: World | None = None  # in a forked child of a rank
_bound_runtime: contextvars.ContextVar[Runtime | None] = contextvars.ContextVar("ringreduce_runtime", default=None)


def start(comm: Any, process_sets: Sequence[Any], dynamic: bool) -> list[tuple[int, tuple[int, ...]]] | None:
    """Form the world, see `ringreduce.init`; returns numbers and members of `process_sets`, or None."""
    global _process_runtime, _process_id, _generations, _gpu, _is_elastic
    if is_initialized():
        return None
    settings = Settings.from_environment(os.environ)
    _is_elastic = settings.elastic
    if settings.elastic:
        worlds.check(settings, comm, _generations)
    log.configure(settings.log_level, settings.log_timestamp)
    if dynamic:
        settings = dataclasses.replace(settings, dynamic_process_sets=True)
    if _generations:
        gc.collect()  # frees the shared memory of the engine before, whose objects refer to each other
    if _generations == 0:  # a later init() keeps the current GPU
        report_init(settings.error_file, settings.stall_check_s)
        _gpu = device_selection.select(settings, os.environ)
    world = form_world(comm, _generations)
    if settings.elastic:
        world = dataclasses.replace(world, origins=tuple(range(world.size)))
    if _generations == 0:
        atexit.register(_at_exit)
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    _generations += 1
    _process_id = os.getpid()
    excepthook.install(settings.error_file)  # from here on the other ranks may wait for this one
    transport = MessageTransport(world)
    try:
        own, everyones = static_sets(world, process_sets)
        sets = check_sets(everyones, world.size - settings.spares)
        agree_on_settings(world, settings, sets)
        host = prepare_host(world, transport, settings)
        usable = usable_algorithms(world.hosts, host.window is not None)
        settings = fitted(settings, world.hosts, usable, host.constants)
        first, elastic = worlds.Entered(world, transport, host, clock.offsets_us(world), sets), None
        if settings.elastic:
            elastic, first = worlds.begin(first)
        world, transport, host, offsets, numbered = first
        _process_runtime = Runtime(world, transport, settings, host, offsets, numbered, _gpu, elastic)
        _log_init(_process_runtime)
    except MismatchError:
        world.free()  # raised on all ranks, so all free it
        raise
    return [(1 + everyones.index(members), members) for members in own]


def _log_init(runtime: Runtime) -> None:
    """Log what init() has found and chosen: on rank 0 for the whole job, on each rank its host, pid and GPU."""
    world = runtime.world
    if world.rank == 0 and world.generation == 0 and (notice := horovod_notice(os.environ)):
        log.LOGGER.warning(notice)
    if world.rank == 0 and log.LOGGER.isEnabledFor(logging.INFO):
        log.LOGGER.info(_summary(runtime))
    if log.LOGGER.isEnabledFor(logging.DEBUG):
        place = f"local rank {world.local_rank} of {world.local_size}, on host {world.hosts[world.rank]}"
        log.LOGGER.debug(
            f"rank {world.rank} of {world.size}: {place} ({socket.gethostname()}), pid {os.getpid()}, GPU {runtime.gpu}"
        )


def _summary(runtime: Runtime) -> str:
    world, engine, defaults = runtime.world, runtime.engine, dataclasses.asdict(Settings())
    hosts, window = len(set(world.hosts)), engine.host.window
    parts = [
        f"ringreduce {__version__}: {world.size} ranks on {hosts} host{'' if hosts == 1 else 's'}",
        " with thread level ".join(mpi_library()),
        "no shared memory" if window is None else f"{len(window.blocks[0])} B of shared memory a rank",
        f"allreduce by {engine.states[GLOBAL].algorithms.text()}",
        f"costs {engine.host.constants}",
    ]
    for name, value in dataclasses.asdict(runtime.settings).items():
        if name not in PER_RANK and value != defaults[name]:
            parts.append(f"{name} is {value!r}")
    return "; ".join(parts)


def static_sets(world: World, process_sets: Sequence[Any]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The members of this rank's process sets, passed as ranks or communicators, and of those of all ranks.

    All ranks pass equal ranks. A communicator may differ by rank, as after Split: each distinct one is a set, in the
    order of the ranks that pass them.
    """
    own: list[tuple[int, ...]] = []
    everyones: list[tuple[int, ...]] = []
    for each in process_sets:
        is_comm = hasattr(each, "Get_group")
        members = tuple(world.ranks_of(each) if is_comm else sorted(each))
        own.append(members)
        everyones += dict.fromkeys(world.allgather_object(members)) if is_comm else [members]
    return own, everyones


def agree_on_settings(world: World, settings: Settings, process_sets: Sequence[Sequence[int]] = ()) -> None:
    """Raise MismatchError when ranks have different versions or different settings that must be equal.

    Cost: gathers a digest of 16 bytes per rank, and the settings where digests differ.
    """
    shared = {**dataclasses.asdict(settings), "version": __version__, "process_sets": list(map(list, process_sets))}
    details = tuple((name, repr(value)) for name, value in shared.items() if name not in PER_RANK)
    if len(set(world.allgather_object(hashlib.blake2b(repr(details).encode(), digest_size=16).digest()))) > 1:
        record = SubmissionRecord(Signature("init", "settings", details=details), calling_line())
        raise MismatchError(mismatch_message(dict(enumerate(world.allgather_object(record))), world.size))


def shutdown() -> None:
    """Leave the world: wait until every rank leaves it too, and free its communicators. Idempotent.

    Pending operations of this rank fail; ranks that wait for this one get PeerLostError, which names the calling line.
    In an elastic job the loss of a rank ends the wait, and communicators are not freed.
    Raises: StalledError when a rank that this one waits for has been stopped for `stall_abort_s`.
    """
    _leave(f"it called shutdown() ({calling_line()})", lambda: False)


def is_initialized() -> bool:
    """True between `init()` and `shutdown()`."""
    return _bound_runtime.get() is not None or _process_runtime is not None


def current(function: str) -> Runtime:
    """The runtime of the calling thread's rank; raises NotInitializedError, which names `function`."""
    runtime = _bound_runtime.get() or _process_runtime
    if runtime is None:
        parent = _parents_world and f"this process was forked from rank {_parents_world.rank}, and is no rank itself"
        raise NotInitializedError(
            f"{function}(): ringreduce has not been initialized; {parent or 'use ringreduce.init()'}"
        )
    return runtime


def current_world(function: str) -> World:
    """The world of `current`; in a forked child, such as a data loader's worker, the parent's, for reading only."""
    runtime = _bound_runtime.get() or _process_runtime
    return current(function).world if runtime or _parents_world is None else _parents_world


@contextlib.contextmanager
def bound(runtime: Runtime) -> Iterator[None]:
    """Make `runtime` the calling thread's own, so that in ringreduce.testing every thread is a rank."""
    token = _bound_runtime.set(runtime)
    try:
        yield
    finally:
        _bound_runtime.reset(token)


def _leave(why: str, interrupted: Callable[[], bool]) -> bool:
    """Leave the world; True when all ranks have, and the communicators are freed."""
    global _process_runtime
    bound_runtime = _bound_runtime.get()
    if bound_runtime is not None:
        _bound_runtime.set(None)
        return bound_runtime.engine.leave(why, interrupted)
    if _process_runtime is None:
        return True
    runtime, _process_runtime = _process_runtime, None
    report_leaving(runtime.settings.error_file, why)
    failed_before = runtime.engine.negotiation.error
    if not runtime.engine.leave(why, interrupted) and runtime.elastic is None:
        error = runtime.engine.negotiation.error
        if isinstance(error, StalledError) and not failed_before:
            raise error
        return False
    runtime.close()
    excepthook.uninstall()
    return True


def _at_exit() -> None:
    """Leave the world when the interpreter exits.

    SIGTERM ends the wait for the other ranks but not the exit under way, so that the launcher learns this rank's own
    exit code: `sys.exit(3)` on one rank while the others wait for it ends the job with 3.
    """
    if os.getpid() != _process_id:  # a forked child: the rank is its parent
        return
    runtime, why = _process_runtime, "its script ended"
    if runtime is not None and runtime.elastic is not None:
        _leave_elastic(runtime, runtime.elastic, why)
        return
    terminated = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        if _leave(why, terminated.is_set) and not _is_elastic:
            finalize_mpi()
    except StalledError as error:
        log.LOGGER.error(str(error))
        excepthook.flush()
        os._exit(excepthook.EXIT_CODE)  # the only way to fail from here: the stopped rank would keep the job for ever


def _leave_elastic(runtime: Runtime, elastic: Elastic, why: str) -> None:
    """Leave the world of an elastic job, but wait for nobody who may be lost, here or in MPI_Finalize.

    A script that failed leaves no world: the others go on when its process has ended.
    """
    error_file = runtime.settings.error_file
    # launcher/hook/sitecustomize.py writes that file for sys.exit() with another code than 0
    if not elastic.has_failed and not os.path.exists(f"{error_file}.exit"):
        report_leaving(error_file, why)
        until_s = time.monotonic() + LEAVE_S
        runtime.engine.leave(why, lambda: time.monotonic() > until_s)


FORK_WARNING = (
    "this rank forks a process, and memory that a network card has registered may not survive that, neither here nor "
    "in the child; start processes by spawn or forkserver, as in DataLoader(…, multiprocessing_context='forkserver')"
)
_REGISTERING_CARDS = ("/sys/class/infiniband", "/sys/class/cxi")  # verbs (EFA and Omni-Path, too), and Slingshot


@functools.cache  # warns once
def _before_fork() -> None:
    """Warn when a rank of several forks and MPI may use such a card; `subprocess` does not come here."""
    if _process_runtime is not None and _process_runtime.world.size > 1 and any(map(_has_entries, _REGISTERING_CARDS)):
        log.LOGGER.warning(FORK_WARNING)


def _has_entries(folder: str) -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def _after_fork() -> None:
    """A forked child, such as a data loader's worker, is no rank: it has neither the engine's thread nor MPI."""
    global _process_runtime, _parents_world
    if _process_runtime is None:
        return
    _parents_world, _process_runtime = _process_runtime.world, None
    excepthook.uninstall()


def check_sets(process_sets: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    """The sorted ranks of each of init()'s process sets; raises InputError for duplicate sets."""
    sets = [tuple(range(size))]
    for ranks in process_sets:
        members = check_members(ranks, size)
        if members in sets:
            which = "that of all ranks" if members == sets[0] else "another one"
            raise InputError(f"process_sets: {list(members)} has the same ranks as {which}; pass each set once")
        sets.append(members)
    return sets[1:]


def check_members(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """The sorted ranks of a process set; raises InputError for duplicates and for ranks that do not exist."""
    members = tuple(sorted(ranks))
    if not members or len(set(members)) < len(members) or not 0 <= members[0] <= members[-1] < size:
        raise InputError(f"process set {list(ranks)}: expected different ranks from 0 to {size - 1}, at least one")
    return members
