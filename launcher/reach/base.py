"""What an answer of a host is, why there may be none, and what a way to hosts is."""

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


class Way(ABC):
    """A way to run a program on hosts: what to start here for it, and what came of it. Keeps no state."""

    @abstractmethod
    def tasks(self, names: Sequence[str], argv: Sequence[str], variables: Mapping[str, str]) -> list[Task]:
        """Return what to run on this host so that each of the hosts runs `argv` once."""

    @abstractmethod
    def answers(self, names: Sequence[str], program: str, outcomes: Sequence[Outcome]) -> list[Answer]:
        """Return the hosts' answers, out of what those tasks have done."""
