"""Runs a program on all hosts of a job: on this one directly, on the others over ssh or through srun."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import islice

from ..hosts import Host, is_here
from ..text import counted, listed
from .base import Answer, Runner
from .parallel import Outcome, Task, run_all
from .refusals import program_problem, took_too_long


class Local(Runner):
    """Runs programs on this host, as children of ringrun."""

    def tasks(self, names: Sequence[str], argv: Sequence[str], variables: Mapping[str, str]) -> list[Task]:
        """See `Runner.tasks`."""
        return [Task(argv, environment={**os.environ, **variables})] * len(names)

    def _answer(self, name: str, program: str, outcome: Outcome) -> Answer:
        stderr = outcome.stderr.decode(errors="replace")
        problem = None
        if outcome.code is None:
            problem = took_too_long(self._timeout_s, stderr)
        elif outcome.not_run:
            problem = program_problem(program, outcome.code, outcome.not_run)
        arrived_s = outcome.arrived_by(len(outcome.stdout))
        return Answer(name, outcome.stdout, stderr, outcome.code, arrived_s, problem)


class Remote:
    """All hosts of a job. `there` runs programs on the others; each host may take `timeout_s` (--start-timeout)."""

    def __init__(self, there: Runner, timeout_s: float, own_name: str | None = None) -> None:
        self._there = there
        self._timeout_s = timeout_s
        self.own_name = own_name or socket.gethostname()

    def run(
        self, names: Sequence[str], argv: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> dict[str, Answer]:
        """Run `argv` once on each of the hosts `names`, all at the same time, and return each one's answer by its name.

        argv:       the program as an absolute path, and its arguments.
        variables:  added to the environment there. Other users of the host may see them for a moment: no secrets.
        """
        groups = [
            (runner, group, runner.tasks(group, argv, variables or {}))
            for runner, here in ((self._there, False), (Local(self._timeout_s), True))
            if (group := [name for name in names if self.is_here(name) == here])
        ]
        owners = [own for _, group, tasks in groups for own in _owners(group, tasks)]

        def progress(outcomes: Sequence[Outcome], after_s: float) -> None:
            late = [name for own, each in zip(owners, outcomes, strict=True) if not each.is_over for name in own]
            asked = f"ringrun: {counted(len(names), 'host')} asked {after_s:.0f} s ago"
            print(
                f"{asked}, {len(names) - len(late)} answered, waiting for {listed(late)}", file=sys.stderr, flush=True
            )

        done = iter(run_all([task for _, _, tasks in groups for task in tasks], self._timeout_s, progress=progress))
        answers = (runner.answers(group, argv[0], [*islice(done, len(tasks))]) for runner, group, tasks in groups)
        found = {answer.host: answer for each in answers for answer in each}
        return {name: found[name] for name in names}

    def is_here(self, name: str) -> bool:
        """Return whether `name` means this host."""
        return is_here(Host(name), self.own_name)


def _owners(names: Sequence[str], tasks: Sequence[Task]) -> Sequence[Sequence[str]]:
    """Return the hosts of each task, which are one each, or all of one task."""
    return [[name] for name in names] if len(tasks) == len(names) else [names]
