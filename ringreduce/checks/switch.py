"""Switching checks on and off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce import runtime
from ringreduce.checks.nan import Nan
from ringreduce.checks.resum import Resum
from ringreduce.checks.twice import Twice
from ringreduce.execution.submission import Submission
from ringreduce.runtime.submit import submit_and_wait
from ringreduce.settings import Checks

__all__ = ["check"]


def check(text: str) -> None:
    """Look for what breaks a training; the setting `check` does it from `init()` on. Every rank calls it.

    text:   such as "nan,divergence:100", see docs/checks.md; empty: no checks any more.
    Cost:   one agreement. While checks are off, one look at an attribute in each operation.
    Raises: SettingsError (a ValueError) for another text; MismatchError on all ranks when they pass different ones;
            PeerLostError.

    >>> check("nan:raise")                                                                             # doctest: +SKIP
    """
    checks, current = Checks.parse(text), runtime.current("check")
    checks.require(current.settings.deterministic)
    submit_and_wait("barrier", "check", details=(("check", str(checks)),))
    current.checks = checks
    start(current)


def start(current: runtime.Runtime) -> None:
    """Begin with the checks of a rank, or with others."""
    current.watch = Nan(current, current.checks.nan) if current.checks.nan else None
    others = [current.watch, current.checks.sdc and Resum(current), current.settings.twice and Twice(current)]
    watches = [each for each in others if each]
    current.watches = Watches(watches) if len(watches) > 1 else next(iter(watches), None)
    current.engine.submitting.watch = current.watches


class Watches:
    """Several as one; see `engine.submitting.Watch`."""

    def __init__(self, watches: Sequence[Any]) -> None:
        self._watches = watches

    def look(self, *arguments: Any) -> list[Any]:
        """What each has seen."""
        return [each.look(*arguments) for each in self._watches]

    def begin(self, made: Submission, seen: Sequence[Any], of_step: bool) -> None:
        """Let those know that have seen something."""
        for each, its in zip(self._watches, seen, strict=True):
            if its is not None:
                each.begin(made, its, of_step)
