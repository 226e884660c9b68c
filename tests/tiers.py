"""What runs always, and what is marked `extended`: `pytest` leaves that out, `pytest -m ""` runs everything.

Extended tests explore: those that take seeds take new ones every day. A seed stands in the test's name, so the line
that pytest prints of a failure tells how to see it again: `TEST_SEED=20260722 pytest -m "" -k 20260722004`.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SEED = int(os.environ.setdefault("TEST_SEED", datetime.date.today().strftime("%Y%m%d")))
"""Of the day, or what was asked for; in the environment, so that all processes of a run have the same."""

extended = pytest.mark.extended


def parted(values: Iterable[Any], quick: Callable[..., bool]) -> list[Any]:
    """The values of a `parametrize`, of which those run always for which `quick` is true; the others are extended.

    A value that is a tuple is one of several arguments, and `quick` gets them one by one.
    """
    found = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*arguments, marks=[] if quick(*arguments) else [extended]))
    return found


def seeds(quick: Iterable[int], explored: int) -> list[Any]:
    """Seeds that are always the same, and `explored` more that are the day's."""
    return [*quick, *(pytest.param(1000 * SEED + number, marks=extended) for number in range(explored))]
