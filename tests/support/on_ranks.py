"""What the conftests of tests on every rank of a job share: `mpirun -np 3 pytest tests/mpi`.

A test that fails on one rank would leave the others waiting for it, so it is reported and the whole job ends. A test
that hangs is ended by pytest-timeout. Either way ringrun ends the other ranks, which print their stacks when it does.
"""

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time

import pytest

import ringreduce as rr
from ringreduce.checks import divergence
from ringreduce.settings.log import JOB
from ringreduce.transport.mpi import abort


def start(config):
    """Form the world; one report of what passed is enough, and failures are printed by whoever fails.

    Called by each conftest of a folder that was asked for.
    """
    faulthandler.register(signal.SIGTERM, os.dup(sys.stderr.fileno()), chain=True)
    rr.init()
    if rr.rank() != 0 and (reporter := config.pluginmanager.getplugin("terminalreporter")):
        config.pluginmanager.unregister(reporter)


def pytest_runtest_logreport(report):
    """End the job if a test has failed on this rank."""
    if report.failed and rr.is_initialized() and rr.size() > 1:
        sys.stderr.write(f"\nrank {rr.rank()} of {rr.size()}: {report.nodeid} failed\n{report.longreprtext}\n")
        sys.stderr.flush()
        if "RINGREDUCE_ERROR_FILE" in os.environ:
            os._exit(1)  # ringrun ends the others
        time.sleep(1)  # MPICH's mpirun forgets what it has not printed yet
        abort(1)


@contextlib.contextmanager
def worlds():
    """form(process_sets, **settings) leaves the world for one with these settings; at the end the usual one again."""
    with pytest.MonkeyPatch.context() as environment:

        def form(process_sets=(), **settings):
            rr.shutdown()
            for name, value in settings.items():
                environment.setenv(f"RINGREDUCE_{name.upper()}", str(value))
            rr.init(process_sets=process_sets)

        yield form
    rr.shutdown()
    rr.init()


@pytest.fixture
def found():
    """found(expected): what divergence:2 has said since the last call, on the rank that says it; None: nothing."""
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr(JOB, "error", said.append)
        patch.setattr(divergence.launcher_link, "report", lambda *_, **__: None)

        def found(expected):
            texts, said[:] = [*said], []
            if expected is None or rr.size() == 1 or rr.rank() > 0:
                assert texts == []
            else:
                assert any(re.search(expected, text) for text in texts), texts

        rr.check("divergence:2")
        yield found
        rr.check("")
