"""What the launcher may ask of this rank while it runs, and what it is told unasked. Nothing here needs MPI.

    ringrun's agent                          this process
    RINGREDUCE_ERROR_FILE.agent  ──doing──→  RINGREDUCE_ERROR_FILE.ask     what the rank waits for
                                 ←─ JSON ──
                                 ←─ JSON ──                                it is in init(); MPI has started;
                                                                           a stall: engine/stalls.py

Unix datagrams: the thread that answers sleeps in the kernel until it is asked, and costs nothing meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1])
LONGEST_QUESTION = 64


class Answerer:
    """Answers the launcher until it is closed."""

    def __init__(self, error_file: str, doing: Callable[[], str]) -> None:
        """Listen beside `error_file`; without one, or where that is not possible, nobody is answered.

        doing: tells what this rank waits for, empty for nothing.
        """
        self._doing = doing
        self._path = f"{error_file}.ask"
        self._socket: socket.socket | None = None
        if error_file:
            with contextlib.suppress(OSError):
                self._listen()
                _tell(error_file, {"started": "ringreduce"})  # the launcher looks what MPI has made, to remove it

    def _listen(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # of an earlier world of this process
        own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            own.bind(self._path)
        except OSError:
            own.close()
            raise
        self._socket = own
        threading.Thread(target=self._serve, args=(own,), name="ringreduce answers", daemon=True).start()

    def _serve(self, own: socket.socket) -> None:
        with own:
            while True:
                question, sender = own.recvfrom(LONGEST_QUESTION)
                if not question:
                    return  # closed
                if not sender:
                    continue  # no address to answer to
                answer = json.dumps({"doing": self._doing(), "package": PACKAGE}).encode()
                with contextlib.suppress(OSError):  # who asked has gone
                    own.sendto(answer, socket.MSG_DONTWAIT, sender)

    def close(self) -> None:
        """Answer no more."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RD)  # wakes the thread, with an empty datagram
            self._socket = None


def tell_of_init(error_file: str, report_after_s: float) -> None:
    """Tell the launcher that this rank calls init(), where it waits for all others; 0: never worth a report."""
    if error_file and report_after_s:
        _tell(error_file, {"init": str(report_after_s), "package": PACKAGE})


def tell_launcher(error_file: str, report: str) -> bool:
    """Tell the launcher of a stall, which then shows all ranks' stacks; False when there is none that listens."""
    return bool(error_file) and _tell(error_file, {"stalled": report})


def _tell(error_file: str, what: Mapping[str, str]) -> bool:
    """Send the launcher a datagram, and return whether somebody is there to read it."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(json.dumps(what).encode(), socket.MSG_DONTWAIT, f"{error_file}.agent")
    except OSError:
        return False
    return True
