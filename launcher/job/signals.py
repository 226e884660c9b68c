"""Signals to ringrun, as events.

Python runs a handler when its main thread comes to it; a signal that comes just before that thread begins to wait for
events would be handled after the next event, which may be in an hour. So the handlers do nothing: the interpreter also
writes each signal's number to a pipe, at once, and a thread reads it there.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Those that end a job."""

FORWARDABLE = (signal.SIGUSR1, signal.SIGUSR2)
"""Those that --forward-signals may hand to the ranks; otherwise they end nothing."""

_HANDLED = (*ENDING, *FORWARDABLE)
_IMPATIENT_SIGNALS = 3
_TOGETHER_S = 1.0  # systemd sends a scope SIGTERM and SIGHUP at once (SendSIGHUP=), which is no impatience


def survive(numbers: Iterable[int]) -> None:
    """Let these signals end nothing from here on; those that ringrun's parent ignores stay ignored."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def exit_at(numbers: Iterable[int]) -> None:
    """Let these signals raise SystemExit, so that all is cleared away, except those that the parent ignores (nohup)."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _end() -> None:
    """Let no such signal end ringrun: the interpreter puts handlers back to the default after this.

    Not earlier, when a job has ended: the next one, of --twice, would take it for its parent's wish.
    """
    for number in FORWARDABLE:
        signal.signal(number, signal.SIG_IGN)


class SignalReader:
    """Passes signals on from the moment it is made, except those that ringrun's parent ignores."""

    def __init__(self, deliver: Callable[[int], None]) -> None:
        """deliver: called with a signal's number, in a thread of its own."""
        self._deliver = deliver
        self._is_started = False
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        survive(_HANDLED)
        atexit.register(_end)

    def start(self) -> None:
        """Begin to deliver; signals wait till then.

        Called after the first mpirun was started, since threads and fork do not mix; again it does nothing.
        """
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        count, latest, until_s = 0, 0, 0.0
        while True:
            for number in os.read(self._read, 64):
                if number in ENDING:
                    if number != latest and time.monotonic() < until_s:
                        continue
                    count, latest, until_s = count + 1, number, time.monotonic() + _TOGETHER_S
                if count >= _IMPATIENT_SIGNALS:
                    # ringrun may be stuck writing to a terminal; the agents see its end and kill their ranks
                    os._exit(128 + number)
                if number in _HANDLED:
                    self._deliver(number)
