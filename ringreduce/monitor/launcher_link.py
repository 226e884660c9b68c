"""Messages between this rank and the launcher: status requests, and reports of init() and of stalls. Without MPI.

    ringrun's agent                          this process
    RINGREDUCE_ERROR_FILE.agent  ──doing──→  RINGREDUCE_ERROR_FILE.ask     request: what does the rank wait for?
                                 ←─ JSON ──                                its answer
                                 ←─ JSON ──                                init() was called; MPI has started; a stall
                                 ── JSON ─→                                in an elastic job: who goes on; new hosts
                                 ── JSON ─→                                somebody watches: record steps for a while

Unix datagrams: the thread that answers sleeps in the kernel until a request arrives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ringreduce.errors import described
from ringreduce.settings.log import LOGGER

PACKAGE = str(Path(__file__).parents[1])
LONGEST_REQUEST = 64 << 10
WAIT_S = 1.0
"""For an agent that has no core just now. The kernel keeps some ten datagrams for it (net.unix.max_dgram_qlen), which a
rank that records its steps fills in a quarter of a second."""
MOST_MAPPED = 256  # lines of maps in one datagram: far more than any MPI's files


class StatusServer:
    """Answers the launcher's requests until it is closed."""

    def __init__(
        self,
        error_file: str,
        waiting_for: Callable[[], str],
        hear: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:
        """Listen beside `error_file`; does nothing without one, or where that is not possible.

        waiting_for: returns what this rank waits for, empty for nothing.
        hear: of an elastic job: is called with what the launcher says of it, in the thread that answers.
        """
        self.waiting_for = waiting_for
        self.record: Callable[[float], object] = lambda _: None
        """Called, in that thread, when this rank is to record its steps for so many seconds."""
        self._hear = hear
        self._path = f"{error_file}.ask"
        self._socket: socket.socket | None = None
        if error_file:
            with contextlib.suppress(OSError):
                self._listen()
                report(error_file, started="ringreduce", shared=_mapped())

    def _listen(self) -> None:
        Path(self._path).unlink(missing_ok=True)  # of an earlier world of this process
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
                request, sender = own.recvfrom(LONGEST_REQUEST)
                if not request:
                    return  # closed
                try:
                    self._answer(own, request, sender)
                except Exception as error:  # as without memory: the next request is heard again
                    LOGGER.error(f"a request of the launcher was not answered: {described(error)}")

    def _answer(self, own: socket.socket, request: bytes, sender: str) -> None:
        said = json.loads(request) if request.startswith(b"{") else {}
        if "record_s" in said:
            self.record(float(said["record_s"]))
        elif said and self._hear is not None:
            self._hear(said)
        elif sender:  # there is an address to answer to
            answer = json.dumps({"doing": self.waiting_for(), "package": PACKAGE}).encode()
            with contextlib.suppress(OSError):  # the sender has gone
                own.sendto(answer, socket.MSG_DONTWAIT, sender)

    def close(self) -> None:
        """Stop answering."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RD)  # wakes the thread, with an empty datagram
            self._socket = None
        # the thread may live on for a moment: let it keep no engine, and its memory, alive
        self.waiting_for, self.record = str, lambda _: None


def report(error_file: str, *, wait_s: float = WAIT_S, **message: object) -> bool:
    """Send the launcher a report; True when it is there to read it. Nothing happens without an `error_file`.

    wait_s: how long an agent may take to read what came before; then the report is lost.

    init, package    this rank is in init(), and may wait there for others: after so many seconds
    started, shared  MPI has started, and these are its files in shared memory
    stalled          a stall, in words: the launcher shows all ranks' stacks
    suspects, why    ranks (of the job's start) that hold the others up, so that it ends them
    meeting          this rank waits for the others of the list with this number; it ends those that do not say so
    reformed         the world of the list with this number works
    committed        this rank has committed, and awaits the restart with these hosts
    measured         what `monitor.reporting` has of this rank's steps
    finding          what a check has found, in words
    notice           what to show of the job, once, though several ranks may say it
    left             why this rank leaves in order: its end is no loss
    """
    if not error_file:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.connect(f"{error_file}.agent")  # first: only then the kernel can wait for room in its queue
            own.settimeout(wait_s)
            own.send(json.dumps(message).encode())
    except OSError:
        return False
    return True


def _mapped() -> list[str]:
    """The lines of this process's maps with files in shared memory: the launcher removes those that a killed rank
    leaves. A rank that dies as soon as MPI is started is gone before its agent has looked.
    """
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
        return [each for each in lines if " /dev/shm/" in each and not each.endswith(" (deleted)")][:MOST_MAPPED]
    return []
