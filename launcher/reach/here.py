"""This host: the program is a child of ringrun, for each name that means this host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .base import Answer, Way
from .parallel import Outcome, Task
from .refusals import program_problem, took_too_long


class Here(Way):
    """Runs programs on this host."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def tasks(self, names: Sequence[str], argv: Sequence[str], variables: Mapping[str, str]) -> list[Task]:
        """See `Way.tasks`."""
        return [Task(argv, environment={**os.environ, **variables})] * len(names)

    def answers(self, names: Sequence[str], program: str, outcomes: Sequence[Outcome]) -> list[Answer]:
        """See `Way.answers`."""
        return [self._answer(name, program, outcome) for name, outcome in zip(names, outcomes, strict=True)]

    def _answer(self, name: str, program: str, outcome: Outcome) -> Answer:
        stderr = outcome.stderr.decode(errors="replace")
        problem = None
        if outcome.code is None:
            problem = took_too_long(self._timeout_s, stderr)
        elif outcome.not_run:
            problem = program_problem(program, outcome.code, outcome.not_run)
        arrived_s = outcome.arrived_by(len(outcome.stdout))
        return Answer(name, outcome.stdout, stderr, outcome.code, arrived_s, problem)
