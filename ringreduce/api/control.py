"""Starting and stopping, handles, join, barrier, and the timeline."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ringreduce import runtime
from ringreduce.api.objects import broadcast_object
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle, Result
from ringreduce.execution.timeline import BY_HAND
from ringreduce.negotiation.protocol import GLOBAL, JOIN
from ringreduce.runtime import lifecycle
from ringreduce.runtime.submit import submit_and_wait

__all__ = ["barrier", "init", "join", "poll", "start_timeline", "stop_timeline", "synchronize"]

DYNAMIC = "dynamic"
_starting = threading.RLock()


def init(comm: Any = None, process_sets: str | Sequence[ProcessSet | Sequence[int]] | None = None) -> None:
    """Start MPI if it is not running, find the ranks and hosts, and start the engine.

    comm: None for all ranks that the launcher started, an mpi4py communicator (duplicated), or a list of ranks of
          COMM_WORLD; every member must call it.
    process_sets: the process sets to use, the same on all ranks (each rank passes its own communicators); or
          "dynamic" to add them later.

    Import your array library first: init() makes this rank's GPU current in CuPy and torch, if they are imported,
    before MPI starts, unless the script has already made a GPU other than number 0 current; see `info().gpu`.

    Idempotent, also where several threads call it; after `shutdown()` a new world is formed. From now on an uncaught
    exception ends the whole job, and `shutdown()` is called when the interpreter exits.
    Raises: StartupError when there is no MPI, or the launcher belongs to a different MPI; SettingsError; MismatchError
            when ranks have different settings or versions; InputError for a wrong process set.
    Source: Horovod's init.
    """
    listed: Any = [] if process_sets is None or process_sets == DYNAMIC else process_sets
    if isinstance(listed, str) or not isinstance(listed, Iterable):
        raise InputError(f'init: process_sets={process_sets!r}; expected a list of ProcessSet, or "{DYNAMIC}"')
    given = [each if isinstance(each, ProcessSet) else ProcessSet(each) for each in listed]
    passed = [each.ranks if each.comm is None else each.comm for each in given]
    with _starting:  # MPI would wait for ever where two threads start it
        own = lifecycle.start(comm, passed, dynamic=process_sets == DYNAMIC)
        if own is not None:
            _begin(given, own)


def _begin(given: Sequence[ProcessSet], own: Sequence[tuple[int | None, tuple[int, ...]]]) -> None:
    """Number the process sets; start the checks, and the timeline."""
    current = runtime.current("init")
    for each, (number, members) in zip(given, own, strict=True):
        each.process_set_id, each.ranks = number, list(members)
    current.start_checks()
    timeline = current.settings.timeline
    is_late = current.world.number > 0  # a spare in the place of a lost rank: the others are not in init()
    if timeline and timeline.upper() != BY_HAND and not is_late:
        _start_timeline_everywhere(timeline, current.settings.timeline_mark_cycles)


def _start_timeline_everywhere(path: str, mark_cycles: bool) -> None:
    """As `start_timeline`, but where rank 0 cannot write the file, all ranks raise."""
    error = ""
    try:
        start_timeline(path, mark_cycles)
    except InputError as exc:
        error = str(exc)
    if error := broadcast_object(error, 0, "timeline"):
        raise InputError(error)


def poll(handle: Handle) -> bool:
    """True when `synchronize(handle)` would return or raise at once; raises InputError for what is no handle."""
    return _handle("poll", handle).poll()


def synchronize(handle: Handle[Result]) -> Result:
    """Wait for an operation that an `_async` function submitted, and return its result.

    Raises: MismatchError, PeerLostError and other CollectiveErrors: what went wrong with it; InputError for what is no
            handle.
    """
    return _handle("synchronize", handle).wait()


def _handle(function: str, handle: Handle[Result]) -> Handle[Result]:
    if not isinstance(handle, Handle):
        raise InputError(f"{function}: handle={handle!r}; expected what a function such as allreduce_async returned")
    return handle


def join(device: int = -1, *, live_average: bool = False, process_set: ProcessSet = global_process_set) -> int:
    """Wait until all ranks have called it; until then take part in the others' allreduces without changing a result.

    For uneven data: a rank that has no more data joins, and the others continue.

    device:       ignored; there for Horovod's scripts.
    live_average: divide an Average by the number of ranks that have not joined, if all that have joined ask for it; by
                  default by all ranks, as in Horovod.
    process_set: the ranks that wait for each other; others know nothing of it.
    Returns: the rank that joined last, the same on all ranks.
    Raises:  PeerLostError. Collectives other than allreduce fail on the other ranks while this one has joined.
    Source:  Horovod's join.
    """
    if (number := number_of(process_set, "join")) < GLOBAL:
        raise InputError(
            f"join: {process_set!r} is a channel, whose operations are in the order of the program on all its ranks; "
            "join the process set of which it was made"
        )
    last: int = submit_and_wait(JOIN, JOIN, number, payload=live_average)
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it.

    Cost:   one agreement.
    Raises: PeerLostError.
    """
    runtime.at_once("barrier", None, None, None, {}, process_set, _barrier)


def _barrier(_: None, name: None, process_set: ProcessSet, waits: bool) -> Handle:
    return barrier_async(process_set, waits=waits)


def barrier_async(process_set: ProcessSet = global_process_set, *, waits: bool = False) -> Handle:
    """Begin a `barrier`.  waits: the caller waits for it at once."""
    return runtime.current("barrier").engine.submit("barrier", None, number_of(process_set, "barrier"), waits=waits)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record a timeline of all ranks, for chrome://tracing or https://ui.perfetto.dev.

    Returns on rank 0 when all ranks record, or after 5 s; they answer while they compute.

    file_path:   where rank 0 writes; calls on other ranks have no effect, since they send their events to rank 0.
                 So a file that cannot be written is an error on rank 0 only.
    mark_cycles: show when the engine announced new tensors.
    Raises: InputError when the file cannot be written.
    Source: Horovod's start_timeline.
    """
    current = runtime.current("start_timeline")
    if current.world.rank != 0:
        return
    try:
        current.engine.timeline.start(file_path, mark_cycles)
    except OSError as exc:
        raise InputError(f"start_timeline: {file_path} cannot be written: {exc.strerror}") from exc


def stop_timeline() -> None:
    """Stop recording; on return the file has the events of all ranks that answered within 5 s. See `start_timeline`."""
    current = runtime.current("stop_timeline")
    if current.world.rank == 0:
        current.engine.timeline.stop()
