"""The launcher's agent hears of this process's death when it begins, by a mutex that the kernel takes from the dying.

A parent is told of an end only when memory and devices are released: 5 ms later with NumPy, 80 with PyTorch. A robust
mutex, though, passes to who waits for it before. The agent's end is launcher/agent/death_notice.py.

Source: pthread_mutexattr_setrobust(3); Linux's get_robust_list(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading

LENGTH = 64  # bytes, of pthread_mutex_t and pthread_mutexattr_t at most
_SHARED = _ROBUST = 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST


def give(error_file: str) -> None:
    """Hold, until this process dies, a mutex in a file beside `error_file`.

    Does nothing outside the main thread, whose end is the process's, or where it is not possible.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: a C library without
        with open(f"{error_file}.death", "x+b") as file:
            file.truncate(LENGTH)
            memory = mmap.mmap(file.fileno(), LENGTH)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # mapped even while Python ends
        library, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(LENGTH)
        mutex = (ctypes.c_char * LENGTH).from_buffer(memory)
        library.pthread_mutexattr_init(attributes)
        library.pthread_mutexattr_setpshared(attributes, _SHARED)
        library.pthread_mutexattr_setrobust(attributes, _ROBUST)
        library.pthread_mutex_init(mutex, attributes)
        library.pthread_mutex_lock(mutex)
