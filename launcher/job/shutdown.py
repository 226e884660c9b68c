"""How ranks are ended: which signals they get, and how long each is given: 5 s in all, if --grace says nothing else."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Step:
    """Send signal `number` (None: nothing yet), then wait up to `wait_s` for the ranks to end."""

    number: int | None
    wait_s: float


_KILL = Step(signal.SIGKILL, 1.0)

AFTER_FAILURE = (Step(None, 0.5), Step(signal.SIGTERM, 2.0), _KILL)
"""A rank has failed: the others may report what they know of it, then end."""

AFTER_INTERRUPT = (Step(signal.SIGINT, 3.0), Step(signal.SIGTERM, 0.5), _KILL)
"""Ctrl-C: a script may save its state."""

AFTER_TIMEOUT = AFTER_FAILURE
"""The job takes too long: as after a failure; the ranks are asked first what they do."""

AFTER_TERMINATE = (Step(signal.SIGTERM, 3.0), _KILL)
"""ringrun got a signal, or nobody reads its output."""

AFTER_COMMIT = (Step(None, 0.5), Step(signal.SIGTERM, 2.0), _KILL)
"""The job is to be started again with more hosts: other ranks may commit, too."""

AT_ONCE = (_KILL,)
"""Somebody is impatient."""


class Shutdown:
    """Where in a sequence of steps the ending of a job is.

    Times are seconds on any one clock; the caller asks `due`, then calls `advance` for the signal to send.
    """

    def __init__(self, steps: Sequence[Step], now_s: float, grace_s: float | None = None) -> None:
        """grace_s: how long to wait after the first signal, unless that is SIGKILL; None: as the steps say."""
        first = next((step for step in steps if step.number), _KILL)
        graced = first if grace_s is None or first is _KILL else replace(first, wait_s=grace_s)
        self._steps = [graced if step is first else step for step in steps]
        self.deadline_s = now_s
        self.latest: int | None = None

    @property
    def exhausted(self) -> bool:
        """Whether no step is left, the last one's time included once `due`."""
        return not self._steps

    def due(self, now_s: float) -> bool:
        """Return whether the present step's time is over."""
        return now_s >= self.deadline_s

    def advance(self, now_s: float) -> int | None:
        """Begin the next step; return its signal, if it has one."""
        step = self._steps.pop(0)
        self.deadline_s = now_s + step.wait_s
        self.latest = step.number or self.latest
        return step.number
