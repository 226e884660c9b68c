"""Reads the agents' connections: all of them in one thread, however many there are.

What may wait for somebody, because nobody reads ringrun's output, is handled in a second thread, and so is all that
has come from that rank behind it. Nothing more is read of the rank meanwhile, which slows it down and fills no memory;
what the others say is heard at once, that one has failed above all.
"""

import contextlib
import itertools
import os
import select
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Protocol

from .link import LOOK_S, Gone, HostSilentError, Link
from .wire import Message

_ONCE = select.EPOLLIN | select.EPOLLONESHOT  # a connection's messages are in one thread at a time
Arrived = Iterator[Message | Gone]


class Reader(Protocol):
    """What handles the messages of one connection, in their order; the last one is Gone."""

    link: Link

    def may_wait(self, message: Message | Gone) -> bool:
        """Return whether `handle` may take long."""

    def handle(self, message: Message | Gone) -> bool:
        """Handle a message; return whether another one may come."""


class ReadLoop:
    """The connections of one job."""

    def __init__(self) -> None:
        self._readers: dict[int, Reader] = {}  # by descriptor
        self._waiting: set[int] = set()  # those that the second thread handles
        self._may_wait: SimpleQueue[tuple[Reader, Arrived] | None] = SimpleQueue()
        self._removed = threading.Condition()

    def start(self) -> None:
        """Begin to read."""
        self._poll = select.epoll()
        self._end, self._other_end = os.pipe()
        self._poll.register(self._end, select.EPOLLIN)
        for work in (self._read, self._handle_what_may_wait):
            threading.Thread(target=work, daemon=True).start()

    def add(self, reader: Reader) -> None:
        """Read this connection to its end, and close it then; any thread may call it."""
        descriptor = reader.link.fileno()
        self._readers[descriptor] = reader
        with contextlib.suppress(ValueError):  # closed meanwhile
            self._poll.register(descriptor, _ONCE)

    def close(self, patience_s: float) -> None:
        """Stop when all connections have ended, or after `patience_s`."""
        with self._removed:
            self._removed.wait_for(lambda: not self._readers, patience_s)
        os.close(self._other_end)
        self._may_wait.put(None)
        for reader in list(self._readers.values()):
            reader.link.close()

    def _read(self) -> None:
        look_at_s = time.monotonic()
        while True:
            for descriptor, _ in self._poll.poll(LOOK_S):
                if descriptor == self._end:
                    self._poll.close()
                    os.close(descriptor)
                    return
                reader = self._readers[descriptor]
                self._handle(reader, reader.link.arrived())
            if time.monotonic() >= look_at_s:
                look_at_s = time.monotonic() + LOOK_S
                self._look_for_silence()

    def _look_for_silence(self) -> None:
        for descriptor, reader in list(self._readers.items()):
            with contextlib.suppress(OSError):  # closed meanwhile
                if descriptor not in self._waiting and reader.link.is_silent():
                    self._handle(reader, iter([Gone(HostSilentError())]))

    def _handle(self, reader: Reader, messages: Arrived) -> None:
        for message in messages:
            if reader.may_wait(message):
                self._waiting.add(reader.link.fileno())
                self._may_wait.put((reader, itertools.chain([message], messages)))
                return
            if not reader.handle(message):
                self._remove(reader)
                return
        self._read_on(reader)

    def _handle_what_may_wait(self) -> None:
        while waiting := self._may_wait.get():
            reader, messages = waiting
            if all(map(reader.handle, messages)):
                self._waiting.discard(reader.link.fileno())
                self._read_on(reader)
            else:
                self._remove(reader)

    def _read_on(self, reader: Reader) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            self._poll.modify(reader.link.fileno(), _ONCE)

    def _remove(self, reader: Reader) -> None:
        descriptor = reader.link.fileno()
        self._waiting.discard(descriptor)
        with self._removed:
            self._readers.pop(descriptor, None)
            reader.link.close()  # not before: the next connection may get the descriptor
            self._removed.notify()
