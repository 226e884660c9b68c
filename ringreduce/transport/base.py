"""What the collectives ask of a transport: ordered messages between ranks, and waiting for them."""

from __future__ import annotations

from typing import Any, Protocol


class Request(Protocol):
    """A message under way."""

    def done(self) -> bool:
        """True when `wait` would return at once."""

    def wait(self) -> None:
        """Return when the message's memory may be used again (sent) or holds the data (received).

        Raises: PeerLostError when the other rank has left and the message can never complete.
        """


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

    def send(self, array: Any, destination: int, tag: int) -> Request:
        """Start sending the bytes of `array`."""

    def receive(self, array: Any, source: int, tag: int) -> Request:
        """Start receiving bytes into `array`."""
