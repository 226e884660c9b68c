"""PMI-1, the server's half: what MPICH asks while it starts and ends, and what it is told."""

import contextlib
import hmac
import itertools
import socket
import threading
from collections.abc import Callable, Sequence

from ..connection.link import HANDSHAKE_TIMEOUT_S

_LINE_BYTES = 1 << 14
_TOGETHER = {"init": "response_to_init pmi_version=1 pmi_subversion=1", "barrier_in": "barrier_out"}
"""What all ranks ask before any is answered."""


class Answers:
    """Of one world, whose ranks are on `hosts`, by rank."""

    def __init__(self, name: str, hosts: Sequence[str], key: bytes) -> None:
        """name: of the world; MPICH names its shared memory by it, so it is to be no other world's of this host."""
        self._name, self._size, self._key = name, len(hosts), key
        self._alike = {
            "get_maxes": "maxes kvsname_max=256 keylen_max=64 vallen_max=1024 rc=0",
            "get_appnum": "appnum appnum=0 rc=0",
            "get_universe_size": f"universe_size size={self._size} rc=0",
            "get_my_kvsname": f"my_kvsname kvsname={name} rc=0",
            "finalize": "finalize_ack rc=0",
            "put": "put_result rc=0 msg=success",
            "get": "get_result rc=-1 msg=key_not_found value=unknown",
        }
        self._found = {("get", "PMI_process_mapping"): f"get_result rc=0 msg=success value={mapping(hosts)}"}
        self._waiting: dict[int, Callable[[str], object]] = {}
        self._expected = {*range(self._size)}
        self._lock = threading.Lock()

    def serve(self, sock: socket.socket) -> None:
        """Answer one rank's MPI, once it has shown that it is that rank, to its end."""
        with contextlib.suppress(OSError, ValueError, KeyError), sock, sock.makefile("rwb", 0) as lines:
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            rank, shown = lines.readline(_LINE_BYTES).decode().split()
            if not hmac.compare_digest(shown, shows(self._key, self._name, int(rank))):
                return
            self._expected.remove(int(rank))  # once only: what has been heard on the way is of no use
            sock.settimeout(None)
            while line := lines.readline(_LINE_BYTES):
                with self._lock:
                    self.answer(int(rank), line.decode(), lambda text: lines.write(text.encode()))

    def answer(self, rank: int, line: str, send: Callable[[str], object]) -> None:
        """Answer a line of a rank's MPI by `send`, now or when all ranks have asked the same."""
        asked = dict(word.partition("=")[::2] for word in line.split())
        command = asked.get("cmd", "")
        if command in _TOGETHER:
            self._waiting[rank] = send
            if len(self._waiting) == self._size:
                for each in self._waiting.values():
                    with contextlib.suppress(OSError):  # it is gone
                        each(f"cmd={_TOGETHER[command]} rc=0\n")
                self._waiting.clear()
            return
        key = asked.get("key", "")
        if command == "put":
            self._found["get", key] = f"get_result rc=0 msg=success value={asked.get('value', '')}"
        told = self._found.get((command, key)) or self._alike.get(command, f"{command}_result rc=-1 msg=not_supported")
        send(f"cmd={told}\n")


def shows(key: bytes, name: str, rank: int) -> str:
    """What a rank's MPI begins with: that it is this rank of the world called `name`."""
    return hmac.digest(key, f"MPI of rank {rank} in {name}".encode(), "sha256").hex()


def mapping(hosts: Sequence[str]) -> str:
    """Which ranks share a host, as MPICH wants it: runs of (number of the host, 1 host, how many ranks).

    >>> mapping(["a", "a", "b", "a"])
    '(vector,(0,1,2),(1,1,1),(0,1,1))'
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    runs = itertools.groupby(numbers[host] for host in hosts)
    return f"(vector,{','.join(f'({number},1,{len(list(run))})' for number, run in runs)})"
