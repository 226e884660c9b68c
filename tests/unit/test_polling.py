"""Who polls the services of an engine, and what holds when one of them fails."""

import threading
from types import SimpleNamespace

import pytest

from ringreduce.engine.polling import Polling
from ringreduce.transport.waiting import WaitsFor


class Service:
    """One that fails, or does nothing."""

    def __init__(self, error=None):
        self.error = error

    def poll(self):
        if self.error is not None:
            raise self.error
        return False

    def waits_for(self):
        return WaitsFor.NOTHING


def polling_of(service, on_error):
    inbox = SimpleNamespace(
        driving=threading.Lock(), poll=lambda: False, waits_for=lambda: WaitsFor.NOTHING, holds_any=lambda: False
    )
    return Polling([], [service], [], inbox, on_error, {})


def test_an_error_is_handled_before_another_thread_can_poll_what_has_failed():
    """The engine's thread would go on with an operation that has failed in a thread that waits."""
    error, held = RuntimeError("the wire is gone"), []
    polling = polling_of(Service(error), lambda exc: held.append((exc, polling.lock.locked())))
    assert not polling.drive(SimpleNamespace(ended=False, process_set=0))
    assert held[0] == (error, True)
    assert not polling.lock.locked()
    with polling.lock, pytest.raises(RuntimeError, match="the wire is gone"):
        polling.poll()
    assert held[-1] == (error, True)


def test_a_handle_that_is_done_leaves_nothing_to_do():
    polling = polling_of(Service(), None)
    assert polling.drive(SimpleNamespace(ended=True, process_set=0))
