"""What the collectives and the engine ask of a transport: ordered messages between ranks, control messages, and rest.

A collective is a generator: it yields each request that it has to wait for, so that whoever drives it may do something
else meanwhile. `complete` drives one to its end.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, Protocol, TypeVar

Result = TypeVar("Result")


class Work(Protocol):
    """A message under way, to or from rank `peer`."""

    @property
    def peer(self) -> int:
        """The other rank."""

    def done(self) -> bool:
        """True when `wait` would return at once."""

    def wait(self) -> None:
        """Return when the message's memory may be used again (sent) or holds the data (received)."""


Steps = Generator[Work, None, Result]
"""A collective under way: yields what it waits for, and is resumed when that is done and was waited for."""


def complete(steps: Steps[Result]) -> Result:
    """Drive a collective to its end, waiting for one request after the other; returns its result."""
    while True:
        try:
            request = next(steps)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        request.wait()


class Transport(Protocol):
    """Messages between `size` ranks, this one being `rank`.

    Two messages from one rank to another with the same tag arrive in the order in which they were sent. Both sides know
    a message's length. Neither side's call blocks; `send` may keep reading its memory, and `receive` writing it, until
    the request was waited for. Arrays are 1-D and contiguous, of NumPy or CuPy; a message holds their bytes.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def send(self, array: Any, destination: int, tag: int) -> Work:
        """Start sending the bytes of `array`."""

    def receive(self, array: Any, source: int, tag: int) -> Work:
        """Start receiving bytes into `array`."""


class ControlMessage(NamedTuple):
    """A small message of any length between engines."""

    source: int
    content: bytes


class EngineTransport(Transport, Protocol):
    """A transport with what an engine needs besides: control messages, and rest that the rank's own threads can end."""

    def send_control(self, content: bytes, destination: int) -> None:
        """Send a control message; two control messages to one rank arrive in order. Returns at once."""

    def recv_control(self) -> list[ControlMessage]:
        """The control messages that have come since the last call."""

    def flushed(self) -> bool:
        """True when all control messages of this rank are on their way, so that it may end."""

    @property
    def most_tags(self) -> int:
        """Tags from 0 to this one less may be used."""

    def cancel_receives(self) -> None:
        """Take back the receives under way, as far as nothing has begun to arrive: their memory changes no more."""

    def sleep(self, timeout_s: float) -> None:
        """Return after `timeout_s`, or earlier when `wake` came."""

    def wake(self) -> None:
        """End this rank's rest, now or the next one; any thread may call it."""
