"""What an objective gets: hyperparameters, equal on all ranks of its team."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce.api.process_sets import ProcessSet
from ringreduce.sweeps.teams import Team


class Pruned(Exception):  # noqa: N818 - as Optuna's TrialPruned
    """Raised in an objective, on all ranks of the team: this trial is not worth finishing."""


class Trial:
    """One trial, on one rank of its team. All ranks of the team call the same methods in the same order.

    number:      of the trial, from 0.
    process_set: the team; pass it to DistributedOptimizer, allreduce and the others. `process_set.rank()` and
                 `.size()` are what rank() and size() are in a job of its own.

    Source: optuna.trial.Trial; Optuna's TorchDistributedTrial.
    """

    def __init__(self, number: int, team: Team) -> None:
        self.number, self._team = number, team
        self.params: dict[str, Any] = {}

    @property
    def process_set(self) -> ProcessSet:
        """The team."""
        return self._team.process_set

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number from `low` to `high`."""
        return self._suggested("suggest_float", name, low, high, step=step, log=log)  # type: ignore[no-any-return]

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number from `low` to `high`, both included."""
        return self._suggested("suggest_int", name, low, high, step=step, log=log)  # type: ignore[no-any-return]

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of `choices`: None, booleans, numbers or strings."""
        return self._suggested("suggest_categorical", name, choices)

    def report(self, value: float, step: int) -> None:
        """Report the first rank's `value` after `step` steps; `should_prune` judges by it."""
        self._team.call(self.number, "report", float(value), step)

    def should_prune(self) -> bool:
        """True when the values reported are so bad that the objective should raise `Pruned`."""
        return self._team.call(self.number, "should_prune")  # type: ignore[no-any-return]

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keep something with the trial in the study; what JSON can say."""
        self._team.call(self.number, "set_user_attr", key, value)

    def _suggested(self, method: str, name: str, *args: Any, **kwargs: Any) -> Any:
        self.params[name] = value = self._team.call(self.number, method, name, *args, **kwargs)
        return value
