"""Somebody on the way between an agent and ringrun, who passes everything on but does something to one message."""

import contextlib
import os
import socket
import threading

from ringrun.connection.frames import HEAD_BYTES
from ringrun.connection.link import NONCE_BYTES, PROOF_BYTES, Address

TAG_BYTES = 16
ATTACKS = {
    "changed": lambda frame: bytes([*frame[:-1], frame[-1] ^ 1]),
    "repeated": lambda frame: frame * 2,
    "another length": lambda frame: b"\0\1\0\0" + frame[4:],
    "cut": lambda frame: frame[: HEAD_BYTES + 1],
}


def through_attacker(address: str, attack: str, direction: str) -> str:
    """Start one; return the address at which he stands in for ringrun."""
    real = Address.parse(address)
    his = real._replace(path=f"{real.path}-{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(his.path)
        listening.listen()
        if os.fork():
            return str(his)
        agent, ringrun = listening.accept()[0], socket.socket(socket.AF_UNIX)
    ringrun.connect(real.path)
    numbers = (1, -1) if direction == "ringrun" else (-1, 0)  # what follows Hello, or Setup
    threading.Thread(target=pass_on, args=(agent, ringrun, attack, numbers[0])).start()
    pass_on(ringrun, agent, attack, numbers[1])
    os._exit(0)


def pass_on(source: socket.socket, sink: socket.socket, attack: str, at: int) -> None:
    """Attack frame number `at`; behind one that is cut comes nothing but the end."""
    read = source.makefile("rb").read
    with contextlib.suppress(OSError):
        for count in (NONCE_BYTES, PROOF_BYTES):
            sink.sendall(read(count))
        number = 0
        while head := read(HEAD_BYTES):
            frame = head + read(int.from_bytes(head[:4], "big") + TAG_BYTES)
            sink.sendall(ATTACKS[attack](frame) if number == at else frame)
            if attack == "cut" and number == at:
                break
            number += 1
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
