"""What bench/hosts.py runs on every rank of its hosts; writes the rows of one rate as JSON. Not started by hand.

The raw streams are contenders like the others and take turns with them: plain TCP between the hosts' first ranks, as
many bytes as an all-reduce must send at least from each host.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from allreduce import expected_sum, wrong_elements
from common import Action, about, in_turns, is_printing, microseconds, neutral, seconds_per_call
from contenders import BY_HAND, by_hand, contenders, element_dtype, stop_gloo

import ringreduce as rr

RAW, RAW_ALL = "raw TCP", "raw TCP, all hosts"
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
PIECE = 1 << 20


class RawStreams:
    """TCP connections from each host's first rank to the next host's, around all hosts."""

    def __init__(self) -> None:
        comm, hosts = neutral(), list(rr.info().hosts)
        self.leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
        self.place = self.leaders.index(comm.rank) if comm.rank in self.leaders else None
        listener = socket.create_server(("", 0)) if self.place is not None else None
        address = (_own_address(), listener.getsockname()[1]) if listener is not None else None
        everyones = comm.allgather(address)
        if listener is not None and self.place is not None:
            right = everyones[self.leaders[(self.place + 1) % len(self.leaders)]]
            self.right = socket.create_connection(right)
            self.left, _ = listener.accept()
            listener.close()
        self.out, self.into = bytes(PIECE), bytearray(PIECE)

    def one(self, nbytes: int) -> None:
        """From the first host to the second; all others rest."""
        if self.place == 0:
            self._send(nbytes)
        elif self.place == 1:
            self._receive(nbytes)

    def everywhere(self, nbytes: int) -> None:
        """From each host to the next, all at the same time."""
        if self.place is None:
            return
        sender = threading.Thread(target=self._send, args=(nbytes,))
        sender.start()
        self._receive(nbytes)
        sender.join()

    def _send(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= self.right.send(memoryview(self.out)[: min(nbytes, PIECE)])

    def _receive(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= self.left.recv_into(self.into, min(nbytes, PIECE))


def _own_address() -> str:
    """This host's, as its name is resolved."""
    return socket.gethostbyname(socket.gethostname())


class Counter:
    """A timer for `in_turns` that also counts what each host sent, per call."""

    def __init__(self) -> None:
        self.sent: dict[Action, list[list[float]]] = {}
        hosts = list(rr.info().hosts)
        self.leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]

    def time(self, action: Action, calls: int) -> float:
        """Seconds a call; `sent` gets what passed eth0 of each host meanwhile."""
        before = int(SENT.read_text())
        seconds = seconds_per_call(action, calls)
        everyones = neutral().allgather((int(SENT.read_text()) - before) / calls)
        self.sent.setdefault(action, []).append([everyones[leader] for leader in self.leaders])
        return seconds

    def most(self, action: Action) -> float:
        """Of the host that sent most; the median run."""
        return max(statistics.median(column) for column in zip(*self.sent[action], strict=True))


def rows(
    nbytes: int, compared: dict[str, Callable[[Any], object]], raw: RawStreams, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One size: all contenders and the raw streams, in turns."""
    dtype = element_dtype(options.dtype)
    array = np.zeros(nbytes // dtype.itemsize, dtype)
    hosts = len(raw.leaders)
    least = 2 * (hosts - 1) * nbytes // hosts
    actions: dict[str, Action] = {
        name: lambda algorithm=algorithm: algorithm(array) for name, algorithm in compared.items()
    }
    actions |= {RAW: lambda: raw.one(least), RAW_ALL: lambda: raw.everywhere(least)}
    counter = Counter()
    times = in_turns(actions, options.runs, options.seconds, before=lambda: array.fill(0), timer=counter.time)
    expected = expected_sum(array.size, rr.size())
    stream_us = microseconds(times[RAW])["time_us"]
    found = []
    for name, each in times.items():
        timed = microseconds(each)
        row = {"size": nbytes, "type": options.dtype, "who": name, **timed, "share": stream_us / timed["time_us"]}
        row |= {"wire_bytes": counter.most(actions[name]), "of_least": counter.most(actions[name]) / least}
        row["wrong"] = wrong_elements(compared[name], array, expected) if name in compared else None
        row["raw_mbit"] = 8 * least / stream_us
        found.append(row)
    return found


def main() -> None:
    """Measure size by size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="a turn")
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--who", nargs="+", required=True)
    parser.add_argument("--json", required=True)
    options = parser.parse_args()
    rr.init()
    known = {**contenders(options.dtype), BY_HAND: by_hand}
    compared = {name: known[name] for name in options.who if name in known}
    raw = RawStreams()
    info = rr.info()
    found: list[dict[str, Any]] = []
    for nbytes in options.sizes:
        found += rows(nbytes, compared, raw, options)
    stop_gloo()
    if is_printing():
        kept = {"header": about(), "constants": str(info.constants), "hosts": info.hosts, "rows": found}
        Path(options.json).write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
