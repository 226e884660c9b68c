"""What `init()` makes and `shutdown()` ends: one Runtime a process, and how to find the current one.

A Runtime is a World, the transports on it, and the settings. Everything that communicates asks `current()`.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ringreduce import failures
from ringreduce._version import __version__
from ringreduce.agreement import Description, agree
from ringreduce.errors import NotInitializedError
from ringreduce.settings import Settings
from ringreduce.transport.base import Transport
from ringreduce.transport.message import MessageTransport
from ringreduce.transport.threads import ThreadTransport
from ringreduce.world import World, finalize_mpi, form_world


class Runtime:
    """A world, the transport on it, and the settings."""

    def __init__(self, world: World, transport: MessageTransport | ThreadTransport, settings: Settings) -> None:
        self.world = world
        self.transport = transport
        self.settings = settings


_process_runtime: Runtime | None = None
_generations = 0
_bound_runtime: contextvars.ContextVar[Runtime | None] = contextvars.ContextVar("ringreduce_runtime", default=None)


def init(comm: Any = None) -> None:
    """Form the world: start MPI if nobody has, and learn which ranks and hosts there are.

    comm: None for all ranks that the launcher started, an mpi4py communicator (duplicated), or a list of ranks of
          COMM_WORLD; every member must call it.

    Idempotent; after `shutdown()` a new world is formed. From now on an uncaught exception ends the whole job, and
    `shutdown()` is called when the interpreter exits.
    Raises: StartupError when there is no MPI, or the launcher is another MPI's; SettingsError; MismatchError when ranks
            have different settings or versions.
    """
    global _process_runtime, _generations
    if is_initialized():
        return
    settings = Settings.from_environment(os.environ)
    world = form_world(comm, _generations)
    if _generations == 0:
        atexit.register(_at_exit)
    _generations += 1
    failures.install(settings.error_file)  # from here on the other ranks may wait for this one
    transport = MessageTransport(world)
    agree_on_settings(transport, settings)
    _process_runtime = Runtime(world, transport, settings)


def agree_on_settings(transport: Transport, settings: Settings) -> None:
    """Raise MismatchError when ranks run different versions or have settings that must be equal but are not."""
    shared = {**dataclasses.asdict(settings), "version": __version__}
    del shared["error_file"]  # each rank's own
    details = tuple((name, repr(value)) for name, value in shared.items())
    agree(transport, [Description("init", "settings", details=details)])


def shutdown() -> None:
    """Leave the world: wait until every rank leaves it too, and free its communicators. Idempotent.

    A rank that still waits in a collective then gets PeerLostError.
    """
    _leave(lambda: False)


def is_initialized() -> bool:
    """True between `init()` and `shutdown()`."""
    return _bound_runtime.get() is not None or _process_runtime is not None


def current(function: str) -> Runtime:
    """The runtime of the calling thread's rank; raises NotInitializedError, which names `function`."""
    runtime = _bound_runtime.get() or _process_runtime
    if runtime is None:
        raise NotInitializedError(function)
    return runtime


@contextlib.contextmanager
def bound(runtime: Runtime) -> Iterator[None]:
    """Make `runtime` the calling thread's own: how ringreduce.testing gives every thread a rank."""
    token = _bound_runtime.set(runtime)
    try:
        yield
    finally:
        _bound_runtime.reset(token)


def _leave(interrupted: Callable[[], bool]) -> bool:
    """Say farewell; True when all ranks have, and the communicators are freed."""
    global _process_runtime
    bound_runtime = _bound_runtime.get()
    if bound_runtime is not None:
        _bound_runtime.set(None)
        return bound_runtime.transport.leave(interrupted)
    if _process_runtime is None:
        return True
    runtime, _process_runtime = _process_runtime, None
    if not runtime.transport.leave(interrupted):
        return False
    failures.uninstall()
    runtime.world.free()
    return True


def _at_exit() -> None:
    """Leave the world when the interpreter exits.

    SIGTERM ends the wait for the other ranks but not the exit under way, so that the launcher learns this rank's own
    exit code: `sys.exit(3)` on one rank while the others wait for it ends the job with 3.
    """
    terminated = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    if _leave(terminated.is_set):
        finalize_mpi()
