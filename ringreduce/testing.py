"""Ranks as threads of one process: test code that uses ringreduce without MPI and without a launcher.

    from ringreduce.testing import run_ranks

    def test_mean():
        def program():
            return ringreduce.allreduce(np.float32(ringreduce.rank()))
        assert run_ranks(4, program) == [1.5, 1.5, 1.5, 1.5]

Inside `program` every function of ringreduce works as on a real rank; `init()` does nothing. Threads that `program`
starts have no rank.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ringreduce import lifecycle, log, runtime
from ringreduce.errors import InputError, PeerLostError
from ringreduce.execution.host import Host, window_bytes
from ringreduce.settings import Settings
from ringreduce.transport.threads import Exchange, Message
from ringreduce.transport.window import Window
from ringreduce.world import World

__all__ = ["Message", "run_ranks"]

Result = TypeVar("Result")


def run_ranks(
    size: int,
    program: Callable[[], Result],
    *,
    hosts: Sequence[int] | None = None,
    settings: Settings | None = None,
    buffered: bool = False,
    timeout_s: float = 20.0,
    messages: list[Message] | None = None,
    process_sets: Sequence[Sequence[int]] = (),
) -> list[Result]:
    """Run `program` on `size` threads, each a rank of one world; returns what each returned, by rank.

    hosts:     host number of each rank; by default all ranks are on one host.
    buffered:  False: a send completes when it is received, which is stricter than MPI; True: at once.
    timeout_s: a longer wait is reported as a deadlock.
    messages:  a list that every message sent is appended to.
    process_sets: members of process sets 1, 2, …

    Raises: the exception of the first rank that failed; the other ranks get PeerLostError.
    """
    if size < 1 or (hosts is not None and len(hosts) != size):
        raise InputError(f"run_ranks: expected one rank or more and one host for each, got {size} and hosts={hosts}")
    settings = settings or Settings()
    log.configure(settings.log_level, settings.log_timestamp)
    exchange = Exchange(size, buffered=buffered, timeout_s=timeout_s)
    sets = lifecycle.check_sets(process_sets, size)
    if not settings.stall_abort_s:
        settings = dataclasses.replace(settings, stall_abort_s=timeout_s)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []
    host_of = tuple(hosts or [0] * size)
    blocks = [np.zeros(window_bytes(settings), np.uint8) for _ in range(size)]

    def run(rank: int) -> None:
        world = World(rank, size, host_of)
        transport = exchange.transport(rank)
        window = Window([blocks[each] for each in range(size) if host_of[each] == host_of[rank]])
        host = Host(world, transport, settings, window)
        own = runtime.Runtime(runtime.Setup(world, transport, host, process_sets=sets), settings)
        why = "its function returned"
        try:
            with runtime.bound(own):
                results[rank] = program()
        except BaseException as exc:  # the calling thread raises it again
            failures.append((rank, exc))
            why = f"it failed with {type(exc).__name__}: {exc}"
        exchange.leave(rank, f"has left the job: {why}")
        own.engine.leave(why)
        try:
            own.engine.gpu.close()
        finally:
            left.wait()  # other ranks may have mapped this GPU memory
        own.engine.gpu.free()

    left = threading.Barrier(size)
    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if messages is not None:
        messages.extend(exchange.messages)
    if failures:
        raise next((exc for _, exc in failures if not isinstance(exc, PeerLostError)), failures[0][1])
    return results
