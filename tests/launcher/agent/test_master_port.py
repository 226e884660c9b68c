"""The port at which rank 0's script may listen: nobody else gets it meanwhile."""

import contextlib
import random
import socket

import pytest

from ringrun.agent import master_port
from ringrun.agent.master_port import MasterPort, free_port


def is_free(port):
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


@pytest.fixture
def one_port(monkeypatch):
    """There is one port to choose from, and it is free."""
    port = next(port for port in random.sample(range(20000, 30000), 100) if is_free(port))
    monkeypatch.setattr(master_port, "_PORTS", [port])
    return port


def test_a_port_is_held_until_the_script_begins_and_kept_from_other_jobs_after_that(one_port):
    found = MasterPort()
    assert (found.number, is_free(one_port)) == (one_port, False)
    found.release()
    assert is_free(one_port)
    another = MasterPort()
    assert another.number not in (0, one_port)
    another.close()
    found.close()
    assert free_port() == one_port


def test_a_port_that_another_program_has_is_not_taken(one_port):
    with socket.create_server(("127.0.0.1", one_port)):
        with contextlib.closing(MasterPort()) as found:
            assert found.number not in (0, one_port)
        assert MasterPort(one_port).number == 0, "the user's own"
    with contextlib.closing(MasterPort(one_port)) as users:
        assert users.number == one_port
        assert MasterPort(one_port).number == 0
        users.release()
        with contextlib.closing(MasterPort(one_port)) as of_another_job:
            assert of_another_job.number == one_port, "which may never be used"
