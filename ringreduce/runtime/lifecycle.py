"""init() and shutdown(): how a process becomes a rank, and how it ends."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import hashlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce import __version__, runtime
from ringreduce.arrays import device_selection
from ringreduce.errors import InputError, MismatchError, PeerLostError, StalledError
from ringreduce.execution.algorithms import tuned, usable_algorithms
from ringreduce.execution.signature import Signature, SubmissionRecord, calling_line, mismatch_message
from ringreduce.kernels import native
from ringreduce.monitor import excepthook, launcher_link
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.runtime import Runtime, Setup, forked_from, process
from ringreduce.runtime.recovery.elastic_runtime import ElasticRuntime, check_start
from ringreduce.runtime.startup import clock
from ringreduce.runtime.startup.shared_memory import prepare_host
from ringreduce.settings import PER_RANK, Settings, horovod_notice, log
from ringreduce.transport import joining
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.mpi import before_finalize, finalize_mpi, mpi_library, rank_that_started
from ringreduce.transport.world import World, form_world

_process_id = 0
_generations = 0
_is_elastic = False  # then lost ranks could not take part in MPI_Finalize
_gpu = device_selection.NOT_ASKED


def start(comm: Any, process_sets: Sequence[Any], dynamic: bool) -> list[tuple[int | None, tuple[int, ...]]] | None:
    """Form the world, see `ringreduce.init`; returns numbers and members of `process_sets`, or None.

    A communicator of no ranks has no number.
    """
    global _process_id, _generations, _gpu, _is_elastic
    if runtime.is_initialized():
        return None
    settings = Settings.from_environment(os.environ)
    _is_elastic = settings.elastic
    if settings.elastic:
        check_start(settings, comm, _generations)
    log.configure(settings.log_level, settings.log_timestamp, functools.partial(_show, settings.error_file))
    if dynamic:
        settings = dataclasses.replace(settings, dynamic_process_sets=True)
    if _generations:
        gc.collect()  # frees the shared memory of the engine before, whose objects refer to each other
    else:  # a later init() keeps the current GPU
        if settings.error_file:
            excepthook.import_launchers_hook()
        if settings.stall_check_s and rank_that_started(os.environ) is None:  # else `form_world` refuses it
            launcher_link.report(settings.error_file, init=settings.stall_check_s, package=launcher_link.PACKAGE)
        _gpu = device_selection.select(settings, os.environ)
    world = form_world(comm, _generations)
    if settings.elastic:
        world = dataclasses.replace(world, origins=tuple(range(world.size)))
    if _generations == 0:
        before_finalize(_at_finalize)
        atexit.register(_at_exit)
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    _generations += 1
    _process_id = os.getpid()
    excepthook.install(settings.error_file, _report)  # from here on the other ranks may wait for this one
    transport = MessageTransport(world)
    try:
        own, all_sets = static_sets(world, process_sets)
        sets = check_sets(all_sets, world.size - settings.spares)
        agree_on_settings(world, settings, sets)
        host = prepare_host(world, transport, settings)
        usable = usable_algorithms(world.hosts, host.window is not None)
        settings = tuned(settings, world.hosts, usable, host.constants)
        made = ElasticRuntime if settings.elastic else Runtime
        process.runtime = made(Setup(world, transport, host, clock.offsets_us(world), sets), settings, _gpu)
        _log_init(process.runtime)
        if joined := joining.membership():
            joined.has_begun(_lose)
    except MismatchError:
        world.free()  # raised on all ranks, so all free it
        raise
    return [(1 + all_sets.index(members) if members else None, members) for members in own]


def _lose(lost: Sequence[int], how: str) -> None:
    """Let the world go, if ranks of it are lost.  lost: their ranks in MPI_COMM_WORLD."""
    if (made := process.runtime) is not None:
        numbers = made.world.in_comm_world()
        if ranks := [numbers.index(each) for each in lost if each in numbers]:
            made.engine.give_up(PeerLostError(how, ranks))


def _show(error_file: str, text: str) -> bool:
    return launcher_link.report(error_file, notice=text)


def _report() -> None:
    """Report the last steps."""
    if process.runtime is not None and process.runtime.engine.reporting is not None:
        process.runtime.engine.reporting.close()


def _log_init(made: Runtime) -> None:
    """Log what init() has found and chosen: on rank 0 for the whole job, on each rank its host, pid and GPU."""
    world = made.world
    if world.rank == 0 and world.generation == 0 and (notice := horovod_notice(os.environ)):
        log.JOB.warning(notice)
    if world.rank == 0 and log.LOGGER.isEnabledFor(logging.INFO):
        log.JOB.info(_summary(made))
    if log.LOGGER.isEnabledFor(logging.DEBUG):
        place = f"local rank {world.local_rank} of {world.local_size}, on host {world.hosts[world.rank]}"
        log.LOGGER.debug(
            f"rank {world.rank} of {world.size}: {place} ({socket.gethostname()}), pid {os.getpid()}, GPU {made.gpu}"
        )


def _summary(made: Runtime) -> str:
    world, engine, defaults = made.world, made.engine, dataclasses.asdict(Settings())
    hosts, window = len(set(world.hosts)), engine.host.window
    parts = [
        f"ringreduce {__version__}: {world.size} ranks on {hosts} host{'' if hosts == 1 else 's'}",
        " with thread level ".join(mpi_library()),
        "no shared memory" if window is None else f"{len(window.blocks[0])} B of shared memory a rank",
        "sums by " + (f"NumPy, not the compiled module: {native.MISSING}" if native.MISSING else "the compiled module"),
        f"allreduce by {engine.states[GLOBAL].algorithms.text()}",
        f"costs {engine.host.constants}",
    ]
    for name, value in dataclasses.asdict(made.settings).items():
        if name not in PER_RANK and value != defaults[name]:
            parts.append(f"{name} is {value!r}")
    return "; ".join(parts)


def static_sets(world: World, process_sets: Sequence[Any]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The members of this rank's process sets, passed as ranks or communicators, and of those of all ranks.

    All ranks pass equal ranks. A communicator may differ by rank, as after Split: each distinct one is a set, in the
    order of the ranks that pass them. Ranks that pass COMM_NULL, of which Split leaves out some, are in none.
    """
    own: list[tuple[int, ...]] = []
    all_sets: list[tuple[int, ...]] = []
    for each in process_sets:
        is_comm = hasattr(each, "Get_group")
        members = tuple(world.ranks_of(each) if is_comm else sorted(each))
        own.append(members)
        all_sets += filter(None, dict.fromkeys(world.allgather_object(members))) if is_comm else [members]
    return own, all_sets


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
    leave(f"it called shutdown() ({calling_line()})", lambda: False)


def leave(why: str, interrupted: Callable[[], bool]) -> bool:
    """Leave the world; True when all ranks have, and the communicators are freed."""
    if (made := runtime.unbind()) is not None:
        return made.engine.leave(why, interrupted)
    if process.runtime is None:
        return True
    made, process.runtime = process.runtime, None
    has_left = made.leave(why, interrupted)
    if has_left:
        excepthook.uninstall()
    return has_left


def _at_finalize() -> None:
    """Leave the world where the script itself ends MPI, as mpi4py's do: the engine's next call would end the job."""
    leave(f"it called MPI.Finalize() ({calling_line()})", lambda: False)


def _at_exit() -> None:
    """Leave the world when the interpreter exits with 0; the launcher ends the others when a rank has failed.

    SIGTERM ends the wait for the other ranks but not the exit under way, so that the launcher learns this rank's own
    exit code.
    """
    if os.getpid() != _process_id:  # a forked child: the rank is its parent
        return
    if excepthook.exit_code():
        _report()
        return
    why = "its script ended"
    if isinstance(process.runtime, ElasticRuntime):
        process.runtime.leave_at_exit(why)
        return
    terminated = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    try:
        if leave(why, terminated.is_set) and not _is_elastic:
            finalize_mpi()
    except StalledError as error:
        log.LOGGER.error(str(error))
        excepthook.flush()
        os._exit(excepthook.EXIT_CODE)  # the only way to fail from here: the stopped rank would keep the job for ever


FORK_WARNING = (
    "a rank forks a process, and memory registered with a network card may not survive this, in the parent or "
    "the child; start processes with spawn or forkserver, as in DataLoader(…, multiprocessing_context='forkserver')"
)
_REGISTERING_CARDS = ("/sys/class/infiniband", "/sys/class/cxi")  # verbs (EFA and Omni-Path, too), and Slingshot


@functools.cache  # warns once
def _before_fork() -> None:
    """Warn when a rank of several forks and MPI may use such a card; `subprocess` does not come here."""
    if process.runtime is not None and process.runtime.world.size > 1 and any(map(_has_entries, _REGISTERING_CARDS)):
        log.JOB.warning(FORK_WARNING)


def _has_entries(folder: str) -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def _after_fork() -> None:
    """A forked child, such as a data loader's worker, is no rank: it has neither the engine's thread nor MPI."""
    if process.runtime is not None:
        parents, process.runtime = process.runtime, None
        process.parents_world = parents.world
        parents.engine.is_not_here(forked_from(parents.world))
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
