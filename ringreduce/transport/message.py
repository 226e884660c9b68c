"""MPI point-to-point messages, with a wait that yields the core and notices a peer that has left.

Ranks may outnumber cores, and a peer may be seconds late, so nobody waits inside MPI: a wait tests the request, gives
the core away between tests, and after a while sleeps.

At its end every rank tells each other how many messages it has exchanged with it (its farewell). A rank that waits for
a message beyond that number knows that it will never come, and raises instead of waiting for ever.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce import buffers
from ringreduce.errors import PeerLostError
from ringreduce.world import World

YIELD_S = 10e-3
"""For so long a wait only gives the core away between tests; after that it sleeps, first 50 µs, then longer.

A rank that sleeps does not move its own sends on: MPI makes progress only inside its functions. With 1 ms, and twice as
many ranks as cores, the ring of 32 MiB took five times longer over MPICH.
"""
FIRST_SLEEP_S = 50e-6
LONGEST_SLEEP_S = 2e-3


class MessageRequest:
    """A message under way, the `number`-th with its peer in its direction."""

    def __init__(
        self, transport: MessageTransport, handle: Any, peer: int, number: int, receiving: bool, memory: Any
    ) -> None:
        self._transport = transport
        self._handle = handle
        self._memory = memory  # MPI holds a bare pointer: keep what it points to alive
        self.peer = peer
        self.number = number
        self.receiving = receiving
        self.arrived: Callable[[], None] | None = None

    def done(self) -> bool:
        """See `Request.done`."""
        return bool(self._handle.Test())

    def wait(self) -> None:
        """See `Request.wait`."""
        if not self._handle.Test():
            self._wait_yielding()
        if self.arrived is not None:
            self.arrived()
            self.arrived = None
        self._memory = None

    def _wait_yielding(self) -> None:
        yield_until = time.monotonic() + YIELD_S
        sleep_s = FIRST_SLEEP_S
        while not self._handle.Test():
            if time.monotonic() < yield_until:
                os.sched_yield()
                continue
            self._transport.raise_if_lost(self)
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, LONGEST_SLEEP_S)


class MessageTransport:
    """See `Transport`. One a process and communicator; used by one thread at a time."""

    def __init__(self, world: World) -> None:
        self._comm = world.comm
        self._control = world.control
        self.rank = world.rank
        self.size = world.size
        self._sent = [0] * world.size
        self._received = [0] * world.size
        self._farewells: dict[int, np.ndarray[Any, Any]] = {}
        """By rank: how many messages it sent to this rank, and how many it received from it, before it left."""

    def send(self, array: Any, destination: int, tag: int) -> MessageRequest:
        """See `Transport.send`."""
        memory = buffers.outgoing(array)
        handle = self._comm.Isend(memory, destination, tag)
        self._sent[destination] += 1
        return MessageRequest(self, handle, destination, self._sent[destination], False, memory)

    def receive(self, array: Any, source: int, tag: int) -> MessageRequest:
        """See `Transport.receive`."""
        memory, arrived = buffers.incoming(array)
        handle = self._comm.Irecv(memory, source, tag)
        self._received[source] += 1
        request = MessageRequest(self, handle, source, self._received[source], True, memory)
        request.arrived = arrived
        return request

    def leave(self, interrupted: Callable[[], bool]) -> bool:
        """Say farewell to all ranks and wait for theirs; False when `interrupted()` became true before all had come.

        Cost: size - 1 messages of 16 bytes a rank. While it waits, it sleeps.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        farewells = [np.array([self._sent[rank], self._received[rank]], np.int64) for rank in others]
        sends = [self._control.Isend(farewell, rank) for farewell, rank in zip(farewells, others, strict=True)]
        sleep_s = FIRST_SLEEP_S
        while len(self._farewells) < len(others) or not all(send.Test() for send in sends):
            self._collect_farewells()
            if interrupted():
                return False
            time.sleep(sleep_s)
            sleep_s = min(2 * sleep_s, 10 * LONGEST_SLEEP_S)
        return True

    def raise_if_lost(self, request: MessageRequest) -> None:
        """Raise PeerLostError when the request's peer has left without taking part in it."""
        self._collect_farewells()
        farewell = self._farewells.get(request.peer)
        if farewell is None or request.number <= farewell[0 if request.receiving else 1]:
            return
        raise PeerLostError(
            f"rank {self.rank} of {self.size} waits for rank {request.peer}, which has left the job: its script ended "
            "or called shutdown(); all ranks must call the same collectives the same number of times",
            [request.peer],
        )

    def _collect_farewells(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        while self._control.Iprobe(status=status):
            farewell = np.empty(2, np.int64)
            self._control.Recv(farewell, status.source)
            self._farewells[status.source] = farewell
