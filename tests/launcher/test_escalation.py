"""The steps that end a job, and their times."""

import signal

import pytest

from ringrun.job.escalation import AFTER_FAILURE, AFTER_INTERRUPT, AFTER_TERMINATE, AT_ONCE, Escalation, Step


@pytest.mark.parametrize("steps", [AFTER_FAILURE, AFTER_INTERRUPT, AFTER_TERMINATE, AT_ONCE])
def test_every_escalation_ends_with_kill_within_five_seconds(steps: tuple[Step, ...]) -> None:
    assert steps[-1].number == signal.SIGKILL
    assert sum(step.wait_s for step in steps) <= 5.0 - 0.5  # half a second for mpirun


def test_steps_are_taken_when_they_are_due() -> None:
    escalation = Escalation([Step(None, 0.5), Step(signal.SIGTERM, 2.0)], now_s=100.0)
    assert escalation.due(100.0)
    assert escalation.advance(100.0) is None
    assert escalation.latest is None
    assert not escalation.due(100.4)
    assert escalation.due(100.5)
    assert escalation.advance(100.5) == signal.SIGTERM
    assert escalation.latest == signal.SIGTERM
    assert escalation.exhausted
    assert not escalation.due(102.4)
    assert escalation.due(102.5)
