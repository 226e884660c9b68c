"""The process that starts the agents: an MPI's launcher, or srun."""

import collections
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from ..output.display import Output
from ..processes import signal_group, start_with_parent
from .events import Events, LauncherEnded
from .shutdown import Step
from .signals import FORWARDABLE

_TAIL_LINES = 200
_LAST_WORDS_S = 1.0  # for what it wrote last; a process that it left behind may hold its pipe open


class MpiLauncher:
    """The mpirun process: its output is kept, and shown when it matters."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], events: Events) -> None:
        self.name = os.path.basename(argv[0])
        self._process = start_with_parent(
            argv,
            signal.SIGKILL,  # agents end by themselves; PRRTE can wait for ever in its handler of SIGTERM
            ignored=FORWARDABLE,  # they are for ranks, if they are sent to all of a job: hydra ends by SIGUSR2
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches ringrun alone
        )
        self._events = events
        self._lines: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self._threads: list[threading.Thread] = []
        self.code: int | None = None  # once it has ended

    @property
    def tail(self) -> list[str]:
        """The last lines that mpirun wrote itself."""
        return list(self._lines)

    def start(self, show: Output | None) -> None:
        """Begin to read its output and to wait for its end; `show` prints the output as it comes."""
        for work in (lambda: self._read(show), self._wait):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self, steps: Sequence[Step]) -> None:
        """Return when mpirun has ended, which `steps` see to."""
        for step in steps:
            if step.number is not None and self.code is None:
                signal_group(self._process.pid, step.number)
            self._threads[1].join(step.wait_s)
            if not self._threads[1].is_alive():
                break

    def _read(self, show: Output | None) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:  # closed at its end: there may be more attempts
            for line in lines:
                text = line.decode(errors="replace").rstrip("\r\n")
                self._lines.append(text)
                if show:
                    show.message([f"[mpirun] {text}"])

    def _wait(self) -> None:
        code = self._process.wait()
        self.code = code if code >= 0 else 128 - code
        self._threads[0].join(_LAST_WORDS_S)  # what it wrote says why it ended
        self._events.put(LauncherEnded())
