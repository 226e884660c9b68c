"""When ranks compare what they should have alike: every so many steps of an optimizer, and no rank is held up.

A comparison is submitted where a gradient has arrived, which every rank's program passes, also that of a rank that
skips steps, and is looked at where the next one has: by then all ranks have submitted it.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, number_of
from ringreduce.api.reduce import allreduce_async
from ringreduce.collectives.ops import ReduceOp
from ringreduce.execution.submission import Handle
from ringreduce.kernels.fingerprint import fingerprint
from ringreduce.settings.log import LOGGER

_used: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()  # names of operations, by engine


class Comparison:
    """The base of comparisons of one optimizer, among the ranks of its process set.

    It fails no job: where a rank is lost, or has left after its last step, it ends, while the training's own operations
    raise what there is to raise.
    """

    says = ""  # its name in log messages
    patience_s = -1.0  # the longest wait for what all ranks should have submitted; < 0: no limit

    def __init__(self, process_set: ProcessSet) -> None:
        self._set = process_set
        self._name = ""  # of its operations: an `_unused_name`
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._reductions = self._steps = 0
        self.has_begun = self._has_ended = False
        self._pending: tuple[Callable[[Any], object], Handle] | None = None

    def begin(self, names: Iterable[str] = ()) -> None:
        """Gradients are about to be reduced.

        names: of the gradients, by which ranks tell optimizers apart that they do not use in one order.
        """
        if not self.has_begun:
            self.has_begun, self._reductions = True, 1
            self._begin(names)

    def reduced(self, names: Iterable[str]) -> None:
        """Gradients of these names have arrived; a name that comes again means another step."""
        for name in names:
            self._counts[name] += 1
            if self._counts[name] > self._reductions:
                self._reductions += 1
                self._look(waits=True)  # all ranks have begun it: they gave what has arrived here after that
                if not self._has_ended and self._is_due():
                    self._compare()

    def stepped(self, waits: bool = False) -> None:
        """The optimizer has stepped.  waits: all ranks call this where they do."""
        self._steps += 1
        self._look(waits)

    def in_order(self, names: Iterable[str] = ()) -> None:
        """All three, of an optimizer that all ranks call equally often."""
        self.begin(names)
        self.reduced([""])
        self.stepped(waits=True)

    def _begin(self, names: Iterable[str]) -> None:
        """Called once, before the first reduction."""

    def _is_due(self) -> bool:
        """Whether to compare in this step, the `_reductions`-th; the same on all ranks."""
        raise NotImplementedError

    def _compare(self) -> None:
        """Begin to compare: `_submit`."""
        raise NotImplementedError

    def _submit(self, numbers: Any, op: ReduceOp, then: Callable[[Any], object], suffix: str = "") -> None:
        """Begin to reduce these numbers; `then` gets the result."""
        try:
            handle = allreduce_async(numbers, name=self._name + suffix, op=op, process_set=self._set)
            self._pending = then, handle
        except Exception as exc:  # whatever it is, the training goes on
            self._end(exc)

    def _look(self, waits: bool = False) -> None:
        try:
            while self._pending and (waits or self._pending[1].poll()):
                (then, handle), self._pending = self._pending, None
                then(handle.wait(self.patience_s))
        except Exception as exc:
            self._end(exc)

    def _end(self, why: object) -> None:
        LOGGER.info(f"{self.says} ends: {why}")
        self._has_ended = True

    def _unused_name(self, names: Iterable[str]) -> str:
        """Another one for each optimizer, on all ranks the same.  names: of gradients that all ranks have."""
        key = fingerprint(repr((number_of(self._set, "check"), sorted(names))).encode())
        used = _used.setdefault(runtime.current("check").engine, Counter())
        used[f"{key:x}"] += 1
        return f"check.{type(self).__name__}.{key:x}.{used[f'{key:x}']}"
