"""What a host's answer is, why there may be none, and what a runner is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .parallel import Outcome, Task


@dataclass(frozen=True)
class Problem:
    """Why a host did not run the program, in one line, and what the user can do about it."""

    what: str
    cure: str


@dataclass(frozen=True)
class Answer:
    """What the program did on one host. With a `problem` it was not run there, or not to its end."""

    host: str
    stdout: bytes = b""
    stderr: str = ""
    code: int | None = None
    """The program's exit code; None where it was not run to its end."""
    arrived_s: float = 0.0
    """This host's clock, in seconds since the epoch, when the last line of stdout came."""
    problem: Problem | None = None


class Runner(ABC):
    """Runs a program on hosts: what to start here for it, and what came of it. Each host may take `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    @abstractmethod
    def tasks(self, names: Sequence[str], argv: Sequence[str], variables: Mapping[str, str]) -> list[Task]:
        """Return what to run on this host so that each of the hosts runs `argv` once."""

    def answers(self, names: Sequence[str], program: str, outcomes: Sequence[Outcome]) -> list[Answer]:
        """Return the hosts' answers, out of what those tasks have done."""
        return [self._answer(name, program, outcome) for name, outcome in zip(names, outcomes, strict=True)]

    def _answer(self, name: str, program: str, outcome: Outcome) -> Answer:
        """Return the answer of one host, where each host has a task of its own."""
        raise NotImplementedError
