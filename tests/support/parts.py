"""A part of the tests: `pytest -m extended --part $(git rev-parse HEAD)`.

Every commit has another part, which is the same whenever it is tested: over some commits all tests run.
"""

import zlib

import pytest

PARTS = 20


def add_options(parser: pytest.Parser) -> None:
    """--part."""
    parser.addoption("--part", metavar="COMMIT", help=f"run one of {PARTS} parts of the tests, chosen by this hash")


def number(name: str) -> int:
    """Which part a commit has, or a test function, from 0 on."""
    return zlib.crc32(name.encode()) % PARTS


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the part's tests; those of one function stay together: they share what is slow."""
    commit = config.getoption("part")
    if not commit:
        return
    chosen, others = [], []
    for item in items:
        (chosen if number(item.nodeid.partition("[")[0]) == number(commit) else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def header(config: pytest.Config) -> list[str]:
    """What is run, for the log."""
    commit = config.getoption("part")
    return [f"part {number(commit) + 1} of {PARTS}, that of {commit}"] if commit else []
