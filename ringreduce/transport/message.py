"""MPI point-to-point messages, and waits that yield the core.

Ranks may outnumber cores, and a peer may be seconds late, so no thread waits inside MPI: a wait tests the request,
yields the core between tests, and after a while sleeps.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.arrays import buffer
from ringreduce.errors import CollectiveError
from ringreduce.transport.base import ControlMessage, Work
from ringreduce.transport.in_flight import CONTROL_TAG, InFlight
from ringreduce.transport.traffic import Traffic
from ringreduce.transport.world import World

MOST_BYTES = 1 << 30  # of one message; from 2 GiB on Open MPI fails
TAGS_PER_WORLD = 1 << 14
"""Of an elastic job: no message meets one of an earlier world. A number is the world's own: `World.number`."""


class MessageWork(Work):
    """A message in flight, which `in_flight` keeps, and with it the memory, to which MPI has a bare pointer."""

    def __init__(self, handle: Any, peer: int, memory: Any, in_flight: InFlight, tag: int, receives: bool) -> None:
        self._handle, self._memory, self._in_flight = handle, memory, in_flight
        self.peer, self.tag, self.receives = peer, tag, receives
        self._is_done = False
        self.traffic: Traffic | None = None
        in_flight.add(self)

    def done(self) -> bool:
        """See `Work.done`."""
        if not self._is_done and self._handle.Test():
            self._is_done, self._memory = True, None
            self._in_flight.discard(self)
            if self.traffic is not None:
                self.traffic.end(self.peer)
        return self._is_done

    def cancel(self) -> None:
        """Cancel the receive, unless something has begun to arrive; `done` tells."""
        if not self.done():
            self._handle.Cancel()


class LongMessage(Work):
    """An array in flight as several messages."""

    def __init__(self, messages: Sequence[Work]) -> None:
        self._messages, self.peer = messages, messages[0].peer

    def done(self) -> bool:
        """See `Work.done`."""
        return all([each.done() for each in self._messages])  # noqa: C419, a list: all make progress


class MessageTransport:
    """See `EngineTransport`. Its messages use `world.comm`, its control messages `world.control`."""

    def __init__(self, world: World) -> None:
        self._comm = world.comm
        self._control = world.control
        self._is_elastic = bool(world.origins)
        self._members = world.origins or range(world.size)  # by rank here: the rank in the communicators
        self._first_tag, self._control_tag = world.number * TAGS_PER_WORLD, world.number
        if self._is_elastic and self._first_tag + TAGS_PER_WORLD > self._mpis_tags():
            raise CollectiveError(f"MPI has tags for {world.number} worlds, and all were used; start the job again")
        self.in_flight = InFlight()
        self.traffic: Traffic | None = None  # while steps are recorded
        self._outbox: deque[MessageWork] = deque()
        self._woken = threading.Lock()  # held until `wake` releases it
        self._woken.acquire()
        self.rank = world.rank
        self.size = world.size

    def send(self, array: Any, destination: int, tag: int) -> Work:
        """See `Transport.send`."""
        memory = buffer.message_bytes(array)
        if memory.nbytes > MOST_BYTES:
            return LongMessage([self.send(each, destination, tag) for each in _cut(memory)])
        handle = self._comm.Isend(_known_to_mpi(memory), self._members[destination], self._first_tag + tag)
        work = MessageWork(handle, destination, memory, self.in_flight, tag, False)
        if self.traffic is not None:
            self.traffic.begin(destination, memory.nbytes)
            work.traffic = self.traffic
        return work

    def receive(self, array: Any, source: int, tag: int, at_most: bool = False) -> Work:
        """See `Transport.receive`. MPI always takes fewer."""
        memory = buffer.message_bytes(array)
        if memory.nbytes > MOST_BYTES:
            return LongMessage([self.receive(each, source, tag) for each in _cut(memory)])
        handle = self._comm.Irecv(_known_to_mpi(memory), self._members[source], self._first_tag + tag)
        return MessageWork(handle, source, memory, self.in_flight, tag, True)

    @property
    def most_tags(self) -> int:
        """See `EngineTransport.most_tags`."""
        return TAGS_PER_WORLD if self._is_elastic else self._mpis_tags()

    def _mpis_tags(self) -> int:
        highest: int = self._mpi.COMM_WORLD.Get_attr(self._mpi.TAG_UB) or 0
        return highest + 1

    @functools.cached_property
    def _mpi(self) -> Any:
        from mpi4py import MPI

        return MPI

    @functools.cached_property
    def _status(self) -> Any:
        return self._mpi.Status()

    def send_control(self, content: bytes, destination: int) -> None:
        """See `EngineTransport.send_control`."""
        request = self._control.Isend(content, self._members[destination], self._control_tag)
        self._outbox.append(MessageWork(request, destination, content, self.in_flight, CONTROL_TAG, False))

    def recv_control(self) -> list[ControlMessage]:
        """See `EngineTransport.recv_control`."""
        self.flushed()
        try:
            return self._take()
        except self._mpi.Exception:
            if not self._is_elastic:
                raise
            self.acknowledge_failures()  # MPI says once that a rank is dead; what that means the launcher says
            return self._take()

    def _take(self) -> list[ControlMessage]:
        """One control message, if one has arrived: MPI may yield the core where none has, so it is handled first."""
        mpi, status = self._mpi, self._status
        message = self._control.Improbe(mpi.ANY_SOURCE, self._control_tag, status)
        if message is None:
            return []
        content = bytearray(status.Get_count(mpi.BYTE))
        message.Recv(content)
        return [ControlMessage(self._members.index(status.source), bytes(content))]

    def acknowledge_failures(self) -> None:
        """Let messages from any rank be received, though some ranks are dead."""
        for comm in (self._comm, self._control):
            with contextlib.suppress(Exception):  # an MPI that cannot do so does not say that ranks are dead, either
                comm.Ack_failed()

    def flushed(self) -> bool:
        """See `EngineTransport.flushed`."""
        while self._outbox and self._outbox[0].done():  # in order: testing the oldest is enough
            self._outbox.popleft()
        return not self._outbox

    def sleep(self, timeout_s: float) -> None:
        """See `EngineTransport.sleep`."""
        self._woken.acquire(timeout=timeout_s)

    def wake(self) -> None:
        """See `EngineTransport.wake`."""
        with contextlib.suppress(RuntimeError):  # already awake
            self._woken.release()


def _cut(memory: Any) -> list[Any]:
    return [memory[low : low + MOST_BYTES] for low in range(0, memory.nbytes, MOST_BYTES)]


def _known_to_mpi(memory: Any) -> Any:
    """GPU memory by its address: mpi4py would ask CuPy, which would synchronize the wrong stream."""
    if isinstance(memory, np.ndarray):
        return memory
    from mpi4py import MPI

    return MPI.buffer.fromaddress(memory.data.ptr, memory.nbytes)
