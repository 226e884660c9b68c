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
    inbox = SimpleNamespace(driving=threading.Lock(), poll=lambda: False, holds_any=lambda: False)
    channels = SimpleNamespace(by_number={}, poll=lambda: False)
    return Polling([], [service], [], inbox, on_error, channels)


def test_an_error_is_handled_before_another_thread_can_poll_what_has_failed():
    """The engine's thread would go on with an operation that has failed in a thread that waits."""
    error, held, handle = RuntimeError("the wire is gone"), [], SimpleNamespace(ended=False, process_set=0)

    def fail(exc):
        held.append((exc, polling.lock.locked()))
        handle.ended = True

    polling = polling_of(Service(error), fail)
    assert not polling.drive(handle)
    assert held[0] == (error, True)
    assert not polling.lock.locked()
    with polling.lock, pytest.raises(RuntimeError, match="the wire is gone"):
        polling.poll()
    assert held[-1] == (error, True)


def test_what_interrupts_a_wait_between_two_polls_breaks_nothing(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("ringreduce.engine.polling.os.sched_yield", interrupt)
    held = []
    polling = polling_of(Service(), held.append)
    with pytest.raises(KeyboardInterrupt):
        polling.drive(SimpleNamespace(ended=False, process_set=0))
    assert not held
    assert not polling.lock.locked()


def test_a_handle_that_is_done_leaves_nothing_to_do():
    polling = polling_of(Service(), None)
    assert polling.drive(SimpleNamespace(ended=True, process_set=0))
