"""For tests that run on every rank of a job: `mpirun -np 3 pytest tests/mpi`. See on_ranks.py."""

import pytest

from ringreduce.transport.message import MessageTransport
from ringreduce.transport.world import form_world
from tests.support import on_ranks
from tests.support.on_ranks import pytest_runtest_logreport  # noqa: F401 - a hook


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    on_ranks.start(config)


COMMUNICATORS = {
    "all ranks": lambda world: world.Dup(),
    "all ranks, reversed": lambda world: world.Split(0, -world.rank),
    "even and odd ranks": lambda world: world.Split(world.rank % 2, world.rank),
}


@pytest.fixture(params=COMMUNICATORS)
def transport(request):
    """A transport over several communicators, one after the other."""
    from mpi4py import MPI

    comm = COMMUNICATORS[request.param](MPI.COMM_WORLD)
    world = form_world(comm)
    yield MessageTransport(world)
    world.free()
    comm.Free()


@pytest.fixture
def anew():
    with on_ranks.worlds() as form:
        yield form
