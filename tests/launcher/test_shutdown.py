"""The steps that end a job, and their times."""

import signal

import pytest

from ringrun.job.shutdown import AFTER_FAILURE, AFTER_INTERRUPT, AFTER_TERMINATE, AT_ONCE, Shutdown, Step


@pytest.mark.parametrize("steps", [AFTER_FAILURE, AFTER_INTERRUPT, AFTER_TERMINATE, AT_ONCE])
def test_every_shutdown_ends_with_kill_within_five_seconds(steps: tuple[Step, ...]) -> None:
    assert steps[-1].number == signal.SIGKILL
    assert sum(step.wait_s for step in steps) <= 5.0 - 0.5  # half a second for mpirun


def test_steps_are_taken_when_they_are_due() -> None:
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
