"""How a rank that rests is woken: by its own threads, and by other ranks. It costs nothing while nobody does.

MPI can only be polled, which an idle rank must not do. So an engine with nothing to do sleeps in select(2) on an
eventfd, which its own threads write to, and on a UDP socket, to which other ranks send a datagram: a ring at the door
that says no more than "look for letters"; a stranger's datagram does no harm. On one host the socket listens on
127.0.0.1 only.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
from collections.abc import Sequence

ADDRESSES = 6
CARD = struct.Struct(f"!H{ADDRESSES * 4}s")
"""What other ranks need to ring here: the port, and up to six IPv4 addresses."""
SELECTABLE = 1024
"""select(2) takes descriptors below this; it counts in microseconds, poll(2) in milliseconds, rounded up."""
SIOCGIFADDR = 0x8915


class Doorbell:
    """One rank's rest, and its door."""

    def __init__(self, one_host: bool) -> None:
        self._own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._door.setblocking(False)
        # all interfaces when there are other hosts: which of them reaches this one is not known
        self._door.bind(("127.0.0.1" if one_host else "0.0.0.0", 0))  # noqa: S104
        self._one_host = one_host

    def card(self) -> bytes:
        """What others need to ring here; always CARD.size bytes."""
        addresses = ["127.0.0.1"] if self._one_host else interface_addresses()
        packed = b"".join(socket.inet_aton(address) for address in addresses[:ADDRESSES])
        return CARD.pack(self._door.getsockname()[1], packed)

    def rest(self, timeout_s: float | None) -> None:
        """Sleep until woken, rung, or `timeout_s` is over."""
        ready = self._ready(timeout_s)
        if self._own in ready:
            os.eventfd_read(self._own)
        if self._door.fileno() in ready:
            self._open()

    def _ready(self, timeout_s: float | None) -> list[int]:
        descriptors = [self._own, self._door.fileno()]
        if max(descriptors) < SELECTABLE:
            return select.select(descriptors, [], [], timeout_s)[0]
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        return [ready for ready, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)]

    def _open(self) -> None:
        try:
            while True:
                self._door.recv(1)
        except OSError:  # nobody else at the door
            return

    def wake(self) -> None:
        """End the rest of this rank."""
        os.eventfd_write(self._own, 1)

    def ring(self, card: bytes, same_host: bool) -> None:
        """Ring at the door that `card` tells of; whether anybody hears it is not known."""
        port, packed = CARD.unpack(card)
        for address in ["127.0.0.1"] if same_host else unpack_addresses(packed):
            try:
                self._door.sendto(b"", (address, port))
            except OSError:  # no route from here to that interface: another one may have it
                continue

    def close(self) -> None:
        """Give the descriptors back."""
        self._door.close()
        os.close(self._own)


def interface_addresses() -> list[str]:
    """The IPv4 addresses of this host's interfaces, the loopback's excepted."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def unpack_addresses(packed: bytes) -> Sequence[str]:
    """The addresses of a card; empty places are left out."""
    quads = [packed[k : k + 4] for k in range(0, len(packed), 4)]
    return [socket.inet_ntoa(quad) for quad in quads if any(quad)]
