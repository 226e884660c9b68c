"""The steps that end a job, and their times."""

import signal

import pytest

from ringrun.job.shutdown import AFTER_FAILURE, AFTER_INTERRUPT, AFTER_TERMINATE, AT_ONCE, Shutdown, Step
from tests.support.loops import in_a_loop


@in_a_loop("steps", [AFTER_FAILURE, AFTER_INTERRUPT, AFTER_TERMINATE, AT_ONCE])
def test_every_shutdown_ends_with_kill_within_five_seconds(steps):
    assert steps[-1].number == signal.SIGKILL
    assert sum(step.wait_s for step in steps) <= 5.0 - 0.5  # half a second for mpirun


@pytest.mark.parametrize(("steps", "first"), [(AFTER_FAILURE, 15), (AFTER_INTERRUPT, 2), (AFTER_TERMINATE, 15)])
def test_grace_is_the_time_after_the_first_signal(steps, first):
    shutdown = Shutdown(steps, 0.0, grace_s=60.0)
    while shutdown.advance(shutdown.deadline_s) is None:
        pass
    assert shutdown.latest == first
    assert not shutdown.due(59.9)
    while not shutdown.exhausted:
        shutdown.advance(shutdown.deadline_s)
    assert shutdown.deadline_s <= 60.0 + 2.0


def test_grace_does_not_delay_what_is_to_be_at_once():
    shutdown = Shutdown(AT_ONCE, 0.0, grace_s=60.0)
    assert (shutdown.advance(0.0), shutdown.due(1.0)) == (signal.SIGKILL, True)


def test_steps_are_taken_when_they_are_due():
    shutdown = Shutdown([Step(None, 0.5), Step(signal.SIGTERM, 2.0)], now_s=100.0)
    assert shutdown.due(100.0)
    assert shutdown.advance(100.0) is None
    assert shutdown.latest is None
    assert not shutdown.due(100.4)
    assert shutdown.due(100.5)
    assert shutdown.advance(100.5) == signal.SIGTERM
    assert shutdown.latest == signal.SIGTERM
    assert shutdown.exhausted
    assert not shutdown.due(102.4)
    assert shutdown.due(102.5)
