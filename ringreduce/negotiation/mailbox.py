"""Control messages between engines: sends them, and calls the handler of each one that arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ringreduce.negotiation.protocol import decode, encode
from ringreduce.transport.base import EngineTransport
from ringreduce.transport.waiting import WaitsFor

Handler = Callable[[int, Any], object]


class Mailbox:
    """The mailbox of one engine."""

    def __init__(self, transport: EngineTransport) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.messages = 0  # how many this rank has sent, and their size
        self.nbytes = 0
        self.handlers: dict[type, Handler] = {}
        """By type of message: called with the rank that sent it, and the message."""
        self._transport = transport

    def send(self, message: Any, rank: int) -> None:
        """Send a message to one rank."""
        self._send(encode(message), rank)

    def send_others(self, message: Any, ranks: Iterable[int] | None = None) -> None:
        """Send a message to all of these ranks, of the world by default, but this one."""
        content = encode(message)
        for rank in range(self.size) if ranks is None else ranks:
            if rank != self.rank:
                self._send(content, rank)

    def _send(self, content: bytes, rank: int) -> None:
        self.messages += 1
        self.nbytes += len(content)
        self._transport.send_control(content, rank)

    def poll(self) -> bool:
        """Handle what has arrived; True when there was anything."""
        messages = self._transport.recv_control()
        for source, content in messages:
            message = decode(content)
            self.handlers[type(message)](source, message)
        return bool(messages)

    def waits_for(self) -> WaitsFor:
        """Control messages, while any is to be sent."""
        return WaitsFor.NOTHING if self._transport.flushed() else WaitsFor.CONTROL

    def flushed(self) -> bool:
        """True when all messages of this rank have been sent, so that it may exit."""
        return self._transport.flushed()
