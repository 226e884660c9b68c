"""Switching checks on and off."""

from __future__ import annotations

from ringreduce import runtime
from ringreduce.api.submit import submit_and_wait
from ringreduce.checks.nan import Nan
from ringreduce.checks.setting import Checks

__all__ = ["check"]


def check(text: str) -> None:
    """Look for what breaks a training; the setting `check` does it from `init()` on. Every rank calls it.

    text:   such as "nan,divergence:100", see docs/checks.md; empty: no checks any more.
    Cost:   one agreement. While checks are off, one look at an attribute in each operation.
    Raises: SettingsError (a ValueError) for another text; MismatchError on all ranks when they pass different ones;
            PeerLostError.

    >>> check("nan:raise")                                                                             # doctest: +SKIP
    """
    checks = Checks.parse(text)
    current = runtime.current("check")
    submit_and_wait("barrier", "check", details=(("check", str(checks)),))
    current.checks = checks
    start(current)


def start(current: runtime.Runtime) -> None:
    """Begin with the checks of a rank, or with others."""
    current.watch = Nan(current, current.checks.nan) if current.checks.nan else None
    current.engine.submitting.watch = current.watch
