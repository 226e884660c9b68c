"""Somebody on the way between an agent and ringrun, who passes everything on but does something to one message."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from ringrun.connection.frames import HEAD_BYTES, FrameWriter
from ringrun.connection.link import NONCE_BYTES, PROOF_BYTES, keys
from ringrun.connection.wire import Address

TAG_BYTES = 16
SEEN: list[bytes] = []  # both nonces, the agent's first, both proofs, and the frames, the agent's Hello first


def of_another_job(frame: bytes, number: int) -> bytes:
    """The same message as the same frame of another job."""
    made = FrameWriter(keys(b"another job's key", SEEN[1] + SEEN[0])[not number])  # 0 is ringrun's
    return [made.frame(each) for each in [b""] * number + [frame[HEAD_BYTES:-TAG_BYTES]]][number]


ATTACKS: dict[str, Callable[[bytes, int, Callable[[], bytes]], bytes]] = {
    "changed": lambda frame, *_: bytes([*frame[:-1], frame[-1] ^ 1]),
    "repeated": lambda frame, *_: frame * 2,
    "another length": lambda frame, *_: b"\0\1\0\0" + frame[4:],
    "cut": lambda frame, *_: frame[: HEAD_BYTES + 1],
    "reordered": lambda frame, number, following: following() + frame,
    "the agent's own": lambda *_: SEEN[4],
    "of another job": lambda frame, number, _: of_another_job(frame, number),
}


def through_attacker(real: Address, attack: str, direction: str) -> Address:
    """Start one; return the address at which he stands in for ringrun."""
    his = real._replace(path=f"{real.path}-{os.getpid()}")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(his.path)
        listening.listen()
        if child := os.fork():
            os.waitpid(child, 0)
            return his
        if os.fork():  # children of the agent's shim end with the agent, before they have passed on its last words
            os._exit(0)
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
            SEEN.append(read(count))
            sink.sendall(SEEN[-1])

        def following() -> bytes:
            head = read(HEAD_BYTES)
            return head and head + read(int.from_bytes(head[:4], "big") + TAG_BYTES)

        number = 0
        while frame := following():
            SEEN.append(frame)
            sink.sendall(ATTACKS[attack](frame, number, following) if number == at else frame)
            if attack == "cut" and number == at:
                break
            number += 1
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
