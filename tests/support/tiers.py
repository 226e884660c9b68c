"""Three lanes: quick tests, which `pytest` runs, `adapters` and `extended`; `pytest -m ""` runs everything.

`adapters` holds what starts jobs of a real MPI, and the suites that need other people's software: frameworks, another
MPI, Slurm, sshd, a browser. Quick tests and adapters run for every commit.

What draws its data by a seed has the same seeds each time. TEST_SEED=20260722 gives others, and a seed stands in the
test's name: `TEST_SEED=20260722 pytest -m "" -k 20260722004` repeats what has failed.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

QUICK = "not extended and not adapters"
"""What `pytest` selects (pyproject.toml)."""
SAME_SEED = 1
SEED = int(os.environ.get("TEST_SEED", SAME_SEED))

extended, adapters = pytest.mark.extended, pytest.mark.adapters


def parted(values: Iterable[Any], quick: Callable[..., bool], otherwise: pytest.MarkDecorator = extended) -> list[Any]:
    """The values of a `parametrize`, of which those are quick for which `quick` is true; the others are extended.

    A value that is a tuple is one of several arguments, and `quick` gets them one by one.
    """
    found = []
    for value in values:
        arguments = value if type(value) is tuple else (value,)
        found.append(pytest.param(*arguments, marks=[] if quick(*arguments) else [otherwise]))
    return found


SEEDS = [0, pytest.param(1, marks=adapters), *(pytest.param(each, marks=extended) for each in (2, 3))]
"""Of programs at random that are long."""


def seeds(quick: Iterable[int], explored: int) -> list[Any]:
    """Seeds that are always the same, and `explored` more that TEST_SEED changes."""
    return [*quick, *(pytest.param(1000 * SEED + number, marks=extended) for number in range(explored))]


JOBS = {"tests/cluster": "hosts", "tests/elastic": "hosts", "tests/end_to_end": "jobs", "tests/examples": "pool"}
"""Folders whose tests start jobs, which takes seconds: they are extended but for those marked `adapters` or `quick`.
With the group of those that are in no other (xdist_group)."""
HALVED = {"tests/launcher": "launcher", "tests/end_to_end": "jobs"}
"""Folders too long for one group: files before test_i are one half."""
FRAMEWORK = "tests/ranks/torch"
"""A framework's suite, whose tests are adapters: a sixth of the time that the quick ones would take with it."""
BY_FILE = ("tests/ranks", "tests/unit")
"""Folders whose quick tests go to workers by the file: what a file makes once is not made by each worker."""


def mark(item: pytest.Item) -> None:
    """Mark a test by its folder, and by the ranks that it asks for."""
    path = item.nodeid.partition("::")[0].split("/")
    folder, file = "/".join(path[:2]), path[-1]  # below tests/launcher is one of each room
    has = item.get_closest_marker
    starts = folder == "tests/launcher" and {"ringrun", "start"} & set(getattr(item, "fixturenames", ()))
    if folder in JOBS and not has("quick") and not has("adapters"):
        item.add_marker(extended)
    if (starts and not has("quick") and not has("without_mpi")) or "/".join(path[:3]) == FRAMEWORK:
        item.add_marker("adapters")
    if starts or folder in JOBS:
        item.add_marker("jobs")
    found = None if item.get_closest_marker("xdist_group") else group(item, folder, file)
    if found:
        item.add_marker(pytest.mark.xdist_group(found))


def has_no_quick_test(path: Path) -> bool:
    """A file of a folder of jobs in which no test is marked `quick`."""
    in_jobs = f"tests/{path.parent.name}" in JOBS and path.parent.parent.name == "tests"
    return in_jobs and path.name.startswith("test_") and "mark.quick" not in path.read_text()


def group(item: pytest.Item, folder: str, file: str) -> str | None:
    """The tests that one worker runs, one after the other.

    A pool of real ranks is made once; jobs of a real MPI share the cores, and their ends are timed.
    """
    if getattr(item, "callspec", None) and item.callspec.params.get("world") in ("mpi", "mpich"):
        return "pool"
    if folder == "tests/launcher" and not item.get_closest_marker("adapters"):
        return None
    if folder in BY_FILE and item.config.option.markexpr == QUICK:
        return item.nodeid.partition("::")[0]
    if folder in HALVED:
        return f"{HALVED[folder]}-{1 if file < 'test_i' else 2}"
    return (JOBS | {"tests/gpu": "hosts"}).get(folder)


def interleaved(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests, each folder's in their order and spread over the whole: some wait while others compute."""
    folders = defaultdict(list)
    for item in items:
        folders[item.nodeid.split("/")[1]].append(item)
    places = {item: number / len(tests) for tests in folders.values() for number, item in enumerate(tests)}
    return sorted(items, key=places.__getitem__)


def without_group(nodeid: str) -> str:
    """As a command line takes it: xdist adds the group."""
    return nodeid if nodeid.rfind("@") < nodeid.rfind("]") else nodeid.partition("@")[0]
