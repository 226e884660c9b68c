"""Ranks as threads of one process: a transport for tests, stricter than any MPI.

A send is not buffered unless asked: it completes only when its receive is posted, and the receiver reads the sender's
memory at that moment. Code that touches a buffer too early, relies on MPI's eager sends, or disagrees about a length
fails here.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict, deque
from typing import Any, NamedTuple

import numpy as np

from ringreduce.arrays import buffer
from ringreduce.errors import CollectiveError, PeerLostError
from ringreduce.transport.base import ControlMessage, Work
from ringreduce.transport.in_flight import InFlight
from ringreduce.transport.traffic import Traffic


class Message(NamedTuple):
    """A sent message, for tests that assert an algorithm's message pattern."""

    source: int
    destination: int
    tag: int
    nbytes: int


class ThreadNetwork:
    """Shared by the threads of one world: mailboxes, and the ranks that have left.

    `timeout_s` bounds every wait: a deadlock becomes an error that names the ranks that wait for each other.
    """

    def __init__(self, size: int, *, buffered: bool = False, timeout_s: float = 20.0) -> None:
        self.size = size
        self.buffered = buffered
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.messages: list[Message] = []
        self.waiting: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self.control_messages: dict[int, list[ControlMessage]] = defaultdict(list)
        self.woken = [threading.Event() for _ in range(size)]
        self._pending_sends: dict[tuple[int, int, int], deque[ThreadWork]] = defaultdict(deque)
        self._pending_receives: dict[tuple[int, int, int], deque[ThreadWork]] = defaultdict(deque)

    def transport(self, rank: int) -> ThreadTransport:
        """The transport of one rank; used by one thread at a time."""
        return ThreadTransport(self, rank)

    def leave(self, rank: int, why: str) -> None:
        """Record that a rank has ended; ranks that wait for it raise PeerLostError."""
        with self.changed:
            self.left[rank] = why
            self.changed.notify_all()

    def post(self, request: ThreadWork) -> None:
        """Match a send with the oldest receive of its kind, or the other way round, or keep it until one comes."""
        with self.changed:
            mine = self._pending_receives if request.receives else self._pending_sends
            others = self._pending_sends if request.receives else self._pending_receives
            if request.receives:
                self._check_not_being_sent(request)
            if others[request.key]:
                other = others[request.key].popleft()
                _deliver(request, other)
                self.changed.notify_all()
                self.woken[other.rank].set()
            else:
                if self.buffered and not request.receives:
                    request.array, request.completed = request.array.copy(), True
                mine[request.key].append(request)

    def cancel(self, receive: ThreadWork) -> None:
        """Drop a receive that has no matching send."""
        with self.changed, contextlib.suppress(ValueError):
            self._pending_receives[receive.key].remove(receive)
            receive.completed = True

    def _check_not_being_sent(self, receive: ThreadWork) -> None:
        for send in itertools.chain.from_iterable(self._pending_sends.values()):
            if send.rank == receive.rank and _overlap(send.array, receive.array):
                raise CollectiveError(
                    f"rank {receive.rank} receives into memory that it is still sending to rank {send.peer}"
                )

    def wait(self, request: ThreadWork) -> None:
        """Block until the request is done; raise when its peer has left, or on timeout."""
        deadline = time.monotonic() + self.timeout_s
        with self.changed:
            self.waiting[request.rank] = str(request)
            while not request.completed:
                if request.peer in self.left:
                    raise PeerLostError(f"{request}, which {self.left[request.peer]}", [request.peer])
                if not self.changed.wait(deadline - time.monotonic()):
                    raise CollectiveError(f"deadlock: {'; '.join(self.waiting[rank] for rank in sorted(self.waiting))}")
            del self.waiting[request.rank]
        request.done()


class ThreadWork(Work):
    """A message in flight."""

    def __init__(
        self,
        network: ThreadNetwork,
        in_flight: InFlight,
        array: Any,
        rank: int,
        peer: int,
        tag: int,
        receives: bool,
        at_most: bool,
    ) -> None:
        self._network, self._in_flight = network, in_flight
        self.array = buffer.message_bytes(array)
        self.rank = rank
        self.peer, self.tag = peer, tag
        self.receives, self.at_most = receives, at_most
        self.key = (peer, rank, tag) if receives else (rank, peer, tag)
        self.completed = False
        self.error = ""
        in_flight.add(self)

    def __str__(self) -> str:
        return f"rank {self.rank} waits to {'receive from' if self.receives else 'send to'} rank {self.peer}"

    def done(self) -> bool:
        """See `Work.done`."""
        if self.completed:
            self._in_flight.discard(self)
        if self.error:
            raise CollectiveError(self.error)
        return self.completed

    def cancel(self) -> None:
        """Cancel the receive, unless its send is there."""
        self._network.cancel(self)

    def wait(self) -> None:
        """See `Work.wait`."""
        self._network.wait(self)


def _overlap(one: Any, other: Any) -> bool:
    return isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and np.may_share_memory(one, other)


def _deliver(one: ThreadWork, other: ThreadWork) -> None:
    receive, send = (one, other) if one.receives else (other, one)
    longest, sent = receive.array.nbytes, send.array.nbytes
    if not (sent <= longest if receive.at_most else sent == longest):
        receive.error = send.error = (
            f"rank {send.rank} sent {send.array.nbytes} bytes, but rank {receive.rank} expected {receive.array.nbytes}"
        )
    else:
        receive.array[: send.array.size] = send.array
    receive.completed = send.completed = True


class ThreadTransport:
    """See `EngineTransport`."""

    def __init__(self, network: ThreadNetwork, rank: int) -> None:
        self._network = network
        self.rank = rank
        self.size = network.size
        self.in_flight = InFlight(set())
        self.traffic: Traffic | None = None  # counts nothing here

    def send(self, array: Any, destination: int, tag: int) -> ThreadWork:
        """See `Transport.send`."""
        self._network.messages.append(Message(self.rank, destination, tag, array.nbytes))
        return self._post(array, destination, tag, receives=False)

    def receive(self, array: Any, source: int, tag: int, at_most: bool = False) -> ThreadWork:
        """See `Transport.receive`."""
        return self._post(array, source, tag, receives=True, at_most=at_most)

    def send_control(self, content: bytes, destination: int) -> None:
        """See `EngineTransport.send_control`."""
        with self._network.changed:
            self._network.control_messages[destination].append(ControlMessage(self.rank, content))
        self._network.woken[destination].set()  # over MPI the rank would poll for it a little later

    def recv_control(self) -> list[ControlMessage]:
        """See `EngineTransport.recv_control`."""
        with self._network.changed:
            return self._network.control_messages.pop(self.rank, [])

    def flushed(self) -> bool:
        """See `EngineTransport.flushed`."""
        return True

    most_tags = 1 << 31

    def sleep(self, timeout_s: float) -> None:
        """See `EngineTransport.sleep`; an arriving message ends it, too."""
        woken = self._network.woken[self.rank]
        woken.wait(timeout_s)
        woken.clear()

    def wake(self) -> None:
        """See `EngineTransport.wake`."""
        self._network.woken[self.rank].set()

    def _post(self, array: Any, peer: int, tag: int, receives: bool, at_most: bool = False) -> ThreadWork:
        request = ThreadWork(self._network, self.in_flight, array, self.rank, peer, tag, receives, at_most)
        self._network.post(request)
        return request
