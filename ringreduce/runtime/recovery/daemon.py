"""Open MPI's daemon on this host, which ends when it loses another host's: a rank must outlive it."""

import contextlib
import ctypes
import os

_LIBRARY = "libpmix.so.2"
_DEFAULT = 0  # the handler for events that have none of their own; PMIx numbers it so


def outlive_daemon() -> None:
    """Let this process go on when the daemon that started it ends; without an effect under another MPI.

    With fault tolerance, too, Open MPI 5 ends a process that has lost its daemon, by a handler that MPI_Init registers
    with PMIx ("An error occurred in PMIx Event Notification"). It hears of lost ranks by it as well, which in this
    job is the launcher's business.

    Source: Open MPI 5.0, ompi/errhandler/errhandler.c, ompi_errhandler_callback.
    """
    with contextlib.suppress(OSError, AttributeError):  # not loaded: MPI is another one, or has PMIx inside
        pmix = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        pmix.PMIx_Deregister_event_handler(ctypes.c_size_t(_DEFAULT), None, None)
