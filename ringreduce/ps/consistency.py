"""When a push is applied, and when a pull is answered: in step, at once, or at most so many steps apart.

    sync   a step's pushes are averaged once all workers' have come, and applied as one: as a ring does
    async  a push is applied when it comes; nobody waits
    ssp    as async, but a worker that has pushed n times pulls only what has all pushes of the first n - s of every
           worker (stale-synchronous parallel; s = 0: nobody is ahead)

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Gradients = dict[str, Any]


def _mean(arrays: Sequence[Any]) -> Any:
    """Of NumPy's arrays of one type, in this; of whole numbers in float64. 16 bits are summed in 32."""
    own = arrays[0].dtype
    mean = arrays[0].astype(np.result_type(own, np.float32))
    for each in arrays[1:]:
        mean += each
    mean /= len(arrays)
    return mean.astype(own, copy=False) if own.kind in "fc" else mean


class Consistency:
    """One server's; its threads, one a worker, call it. `apply` is called by one thread at a time."""

    def __init__(self, workers: Sequence[int], staleness: float, apply: Callable[[Gradients], None]) -> None:
        """staleness: s; infinite for async."""
        self.pushes = dict.fromkeys(workers, 0)  # of the workers that have not left
        self._gone: dict[int, int] = {}  # as many as the others had, who come again after the loss of a rank
        self.most_stale = 0  # most pushes that a worker was ahead of another when it pulled
        self.changed = threading.Condition()
        self.error: BaseException | None = None  # of another thread: nobody waits any more
        self._staleness, self._apply = staleness, apply

    def push(self, worker: int, gradients: Gradients) -> None:
        """Apply the gradients."""
        with self.changed:
            self._apply(gradients)
            self.pushes[worker] += 1
            self.changed.notify_all()

    def wait_to_pull(self, worker: int) -> None:
        """Wait until this worker may have the parameters; call it with `changed` held, and read them before it goes."""
        self._wait_for(lambda: self._ahead(worker) <= self._staleness)
        self.most_stale = max(self.most_stale, self._ahead(worker))

    def leave(self, worker: int) -> None:
        """Wait for this worker no more."""
        with self.changed:
            self._gone[worker] = self.pushes.pop(worker)
            self.changed.notify_all()

    def applied(self) -> dict[int, int]:
        """How many pushes of each worker are applied, also of those that have left."""
        return self._gone | self.pushes

    def fail(self, error: BaseException) -> None:
        """End all waits with this error."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def resume(self, workers: Sequence[int]) -> None:
        """Go on with these workers after an error; no thread calls it meanwhile."""
        applied = self.applied()
        self.error, self.pushes, self._gone = None, {worker: applied[worker] for worker in workers}, {}

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self.changed.wait_for(lambda: self.error or condition())
        if self.error is not None:
            raise self.error

    def _ahead(self, worker: int) -> int:
        return self.pushes[worker] - min(self.pushes.values())


class Sync(Consistency):
    """All workers' gradients are averaged, in the order of their ranks, and applied as one."""

    def __init__(self, workers: Sequence[int], apply: Callable[[Gradients], None]) -> None:
        super().__init__(workers, 0, apply)
        self._pushed: dict[int, Gradients] = {}

    def push(self, worker: int, gradients: Gradients) -> None:
        """Wait for the other workers' gradients; whose come last applies all."""
        with self.changed:
            self._pushed[worker] = gradients
            self._step()
            self._wait_for(lambda: worker not in self._pushed)

    def leave(self, worker: int) -> None:
        """Wait for this worker no more."""
        with self.changed:
            super().leave(worker)
            self._step()

    def resume(self, workers: Sequence[int]) -> None:
        """Go on with these workers, who push again what was not applied."""
        super().resume(workers)
        self._pushed.clear()

    def _step(self) -> None:
        if not self.pushes or len(self._pushed) < len(self.pushes):
            return
        pushed = [self._pushed[worker] for worker in self.pushes]
        self._apply({name: _mean([each[name] for each in pushed]) for name in pushed[0]})
        for worker in self.pushes:
            self.pushes[worker] += 1
        self._pushed.clear()
        self.changed.notify_all()
