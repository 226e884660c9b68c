"""Switching checks on and off."""

from __future__ import annotations

from ringreduce import runtime
from ringreduce.checks.nan import Nan
from ringreduce.checks.resum import Resum
from ringreduce.checks.twice import of_rank
from ringreduce.runtime.submit import submit_and_wait
from ringreduce.settings import Checks

__all__ = ["check"]


def check(text: str) -> None:
    """Look for what breaks training; the setting `check` does so from `init()` on. Every rank calls it.

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
    twice = current.settings.twice and of_rank(current.settings.twice, current.world.rank)
    found = [current.watch, current.checks.sdc and Resum(current), twice]
    current.inspectors = current.engine.submitting.inspectors = [each for each in found if each]
