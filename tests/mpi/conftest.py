"""For tests that run on every rank of a job: `ringrun -np 3 python -m pytest --with-mpi tests/mpi`.

A test that fails on one rank would leave the others waiting for it, so it is reported and the whole job ends. A test
that hangs is ended by pytest-timeout. Either way ringrun ends the other ranks, which print their stacks when it does.
"""

import faulthandler
import os
import signal
import sys

import pytest

import ringreduce as rr
from ringreduce.transport.message import MessageTransport
from ringreduce.world import abort, form_world


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    faulthandler.register(signal.SIGTERM, os.dup(sys.stderr.fileno()), chain=True)
    rr.init()
    if rr.rank() != 0:  # one report of what passed is enough; failures are printed by whoever fails
        config.pluginmanager.unregister(config.pluginmanager.getplugin("terminalreporter"))


def pytest_runtest_logreport(report):
    if report.failed and rr.is_initialized() and rr.size() > 1:
        sys.stderr.write(f"\nrank {rr.rank()} of {rr.size()}: {report.nodeid} failed\n{report.longreprtext}\n")
        sys.stderr.flush()
        if "RINGREDUCE_ERROR_FILE" in os.environ:
            os._exit(1)  # ringrun ends the others
        abort(1)


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
