"""Do all ranks step by the same learning rates? Looked at in every job, as nothing else would say so.

A scheduler that decides by the loss of one rank, as ReduceLROnPlateau does, sets this rank's learning rate only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet
from ringreduce.checks.blame import values_text
from ringreduce.checks.comparison import Comparison
from ringreduce.collectives.ops import Sum
from ringreduce.settings.log import JOB

MOST_STEPS = 50
"""Between two comparisons; at first an eighth of the steps so far."""
TOLERANCE = 1e-5
"""Relative: a cosine may differ in its last bits from one kind of processor to another."""


class LearningRates(Comparison):
    """Warns once, on one rank, where they differ, and then compares no more.

    rates: returns those of now, one for each group of parameters.

    Cost: an all-reduce of 8 bytes for each rank and each of its groups, every MOST_STEPS steps; nobody waits for it.
    """

    says = "the comparison of learning rates"
    patience_s = 10.0

    def __init__(self, process_set: ProcessSet, rates: Callable[[], Sequence[Any]]) -> None:
        super().__init__(process_set)
        self._rates, self._due = rates, 2
        self._row: list[float] = []

    def stepped(self, waits: bool = False) -> None:
        """Read those of this step: when the next gradient arrives, only some ranks may have set new ones."""
        super().stepped(waits)
        if self._reductions + 1 >= self._due and not self._has_ended:
            self._name = self._name or self._unused_name(self._counts)
            rank = runtime.current("DistributedOptimizer").world.rank
            self._row = [1.0 + rank, *map(_finite, self._rates())]

    def _is_due(self) -> bool:
        return self._reductions >= self._due and bool(self._name)

    def _compare(self) -> None:
        at = self._reductions - 1
        self._due = self._reductions + min(MOST_STEPS, 1 + self._reductions // 8)
        rows = np.zeros((self._set.size() or 1, len(self._row)))
        rows[self._set.rank()] = self._row
        self._submit(rows, Sum, lambda rows: self._compared(at, rows[rows[:, 0] > 0]))  # a joined rank's are zeros

    def _compared(self, at: int, rows: Any) -> None:
        ranks, rates = (rows[:, 0].astype(int) - 1).tolist(), rows[:, 1:]
        group = next(iter(np.flatnonzero(np.ptp(rates, 0) > TOLERANCE * np.abs(rates).max(0))), None)
        if group is None:
            return
        self._has_ended = True
        if runtime.current("DistributedOptimizer").world.rank == ranks[0]:
            said = values_text({rank: f"{rate:g}" for rank, rate in zip(ranks, rates[:, group].tolist(), strict=True)})
            of_group = f" of group {group}" if group else ""
            JOB.warning(
                f"DistributedOptimizer: after {at} steps the learning rate{of_group} differs: {said}; so their "
                "parameters drift apart. If a scheduler depends on a loss, as ReduceLROnPlateau does, give it the "
                "average of all ranks: scheduler.step(hvd.allreduce(loss, name='loss')) (shown once)"
            )


def _finite(rate: Any) -> float:
    """0 for what is no such number: everybody's optimizer may keep anything there."""
    try:
        return float(rate) if math.isfinite(rate) else 0.0
    except Exception:
        return 0.0
