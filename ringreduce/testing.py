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

from ringreduce import runtime
from ringreduce.checks.switch import start
from ringreduce.errors import InputError, PeerLostError, described
from ringreduce.execution.host import HostResources, window_bytes
from ringreduce.runtime import lifecycle
from ringreduce.settings import Settings, log
from ringreduce.transport.threads import Message, ThreadNetwork
from ringreduce.transport.window import Window
from ringreduce.transport.world import World

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
    if not settings.stall_abort_s:
        settings = dataclasses.replace(settings, stall_abort_s=timeout_s)
    job = _Job(tuple(hosts or [0] * size), settings, ThreadNetwork(size, buffered=buffered, timeout_s=timeout_s))
    sets = lifecycle.check_sets(process_sets, size)
    threads = [
        threading.Thread(target=job.run, args=(rank, program, sets), name=f"rank {rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if messages is not None:
        messages.extend(job.network.messages)
    if job.failures:
        raise next((exc for exc in job.failures if not isinstance(exc, PeerLostError)), job.failures[0])
    return [job.results[rank] for rank in range(size)]


class _Job:
    """What the ranks of one world share."""

    def __init__(self, hosts: tuple[int, ...], settings: Settings, network: ThreadNetwork) -> None:
        self.hosts, self.settings, self.network = hosts, settings, network
        self.blocks = [np.zeros(window_bytes(settings), np.uint8) for _ in hosts]
        self.results: dict[int, Any] = {}
        self.failures: list[BaseException] = []
        self.left = threading.Barrier(len(hosts))

    def run(self, rank: int, program: Callable[[], Any], sets: Sequence[Sequence[int]]) -> None:
        """Be this rank, from its engine's start to its end."""
        world, transport = World(rank, len(self.hosts), self.hosts), self.network.transport(rank)
        window = Window(
            [block for block, host in zip(self.blocks, self.hosts, strict=True) if host == self.hosts[rank]]
        )
        host = HostResources(world, transport, self.settings, window)
        own = runtime.Runtime(runtime.Setup(world, transport, host, process_sets=sets), self.settings)
        why = "its function returned"
        try:
            start(own)
            with runtime.bound(own):
                self.results[rank] = program()
        except BaseException as exc:  # the calling thread raises it again
            self.failures.append(exc)
            why = f"it failed with {described(exc)}"
        self.network.leave(rank, f"has left the job: {why}")
        own.engine.leave(why)
        try:
            own.engine.gpu.close()
        finally:
            self.left.wait()  # other ranks may have mapped this GPU memory
        own.engine.gpu.free()
