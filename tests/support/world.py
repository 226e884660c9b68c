"""One body, two worlds: ranks that are threads of this process, and ranks of a real job (tests/support/pool.py).

    @on_every_world
    def test_sum(world, size):
        assert world(size).run(lambda: rr.allreduce(1, op=rr.Sum)) == [size] * size

A function for a real job travels there: it must not count on what the test changed here (monkeypatch, fixtures), and
gives back what it found out, rather than changing something outside of itself.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringreduce.testing import run_ranks
from tests.support.pool import Pool
from tests.support.tiers import extended

_SIZES = [("threads", 3), ("mpi", 2), pytest.param("mpi", 3, marks=extended)]
_MPICH = [pytest.param("mpich", size, marks=extended) for size in (2, 3)]
on_every_world = pytest.mark.parametrize(("world", "size"), [*_SIZES, *_MPICH], indirect=["world"])
_HOSTS = [(0, 1, 2), (0, 0, 1, 1), (1, 0, 1)]
on_every_world_and_hosts = pytest.mark.parametrize(
    ("world", "size"), [*_SIZES, *_MPICH, *((hosts, len(hosts)) for hosts in _HOSTS)], indirect=["world"], ids=str
)
"""Also on threads that are ranks of these hosts."""
on_every_world_with_torch = pytest.mark.parametrize(("world", "size"), _SIZES, indirect=["world"])
"""The environment with MPICH has no torch."""


on_a_pool = pytest.mark.parametrize("world", ["mpi"], ids=["a pool"], indirect=True)  # an id "mpi" is pytest-mpi's


@dataclasses.dataclass(frozen=True)
class Threads:
    """So many threads that are ranks."""

    size: int
    hosts: tuple[int, ...] | None = None

    def run(self, program: Callable[[], Any], **options: Any) -> list[Any]:
        """See `ringreduce.testing.run_ranks`."""
        return run_ranks(self.size, program, hosts=self.hosts, **options)


class Pools:
    """The pools of this session, by interpreter and size; each is made when it is first needed, or has ended."""

    def __init__(self) -> None:
        self._pools: dict[tuple[Path, int], Pool] = {}

    def of(self, python: Path, size: int) -> Pool:
        """The pool of so many ranks that `python` runs."""
        pool = self._pools.get((python, size))
        if pool is None or pool.ended:
            pool = self._pools[python, size] = Pool(python, size)
        return pool

    def close(self) -> None:
        """End them all."""
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools():
    made = Pools()
    yield made
    made.close()


@pytest.fixture
def world(request):
    """`world(3).run(program)` runs it on 3 ranks: threads, or what on_every_world says."""
    backend = getattr(request, "param", "threads")
    if backend == "threads":
        return Threads
    if isinstance(backend, tuple):
        return functools.partial(Threads, hosts=backend)
    python = request.getfixturevalue("mpich_python") if backend == "mpich" else Path(sys.executable)
    return lambda size: request.getfixturevalue("pools").of(python, size)
