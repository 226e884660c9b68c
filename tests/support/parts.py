"""A part of the tests, for as long as there is time: `pytest -m extended --part $(git rev-parse HEAD) --minutes 10`.

Every commit has another part, and another order in it: over some commits all tests run, also those of a part that takes
longer than there is time.
"""

import random
import time
import zlib

import pytest

PARTS = 5
STARTED_S = time.monotonic()


def add_options(parser: pytest.Parser) -> None:
    """--part and --minutes."""
    parser.addoption("--part", metavar="COMMIT", help=f"run one of {PARTS} parts of the tests, chosen by this hash")
    parser.addoption("--minutes", type=float, help="skip what has not begun after so long; that is no failure")


def number(commit: str) -> int:
    """Which part a commit has, from 0 on."""
    return zlib.crc32(commit.encode()) % PARTS


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the part's tests, in the commit's order; those of one function stay together: they share what is slow."""
    commit = config.getoption("part")
    if not commit:
        return
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = [name for name in functions if zlib.crc32(name.encode()) % PARTS == number(commit)]
    random.Random(commit).shuffle(chosen)
    left_out = [item for name in functions if name not in set(chosen) for item in functions[name]]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for name in chosen for item in functions[name]]


def header(config: pytest.Config) -> list[str]:
    """What is run, for the log."""
    commit = config.getoption("part")
    return [f"part {number(commit) + 1} of {PARTS}, in an order by {commit}"] if commit else []


def skip_when_the_time_is_up(config: pytest.Config) -> None:
    """Called before each test."""
    minutes = config.getoption("minutes")
    if minutes is not None and time.monotonic() > STARTED_S + 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes are over; other commits begin with other tests")
