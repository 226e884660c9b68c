"""Do all ranks have the same parameters? They compare fingerprints every so many steps; blame.py says who differs.

    before the first gradient   a rank that has frozen a parameter would not take part in its reduction
    every N reductions          the parameters as they are then, before that step
      one all-reduce            32 bytes: have all ranks equal parameters, and equal buffers?
      if not: one allgather     32 bytes for each of them, once

But for the first time nobody waits for a rank that is late: a comparison is submitted where a gradient has arrived,
which every rank's program passes, also that of a rank that skips steps, and is looked at where the next one has.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ringreduce import runtime, trees
from ringreduce.api.gather import allgather_async
from ringreduce.api.process_sets import ProcessSet
from ringreduce.api.reduce import allreduce_async
from ringreduce.arrays.view import as_buffer
from ringreduce.checks import blame
from ringreduce.checks.blame import BUFFER, OWNED, TRAINS
from ringreduce.checks.fingerprint import fingerprint
from ringreduce.execution.submission import Handle
from ringreduce.log import LOGGER
from ringreduce.monitor import launcher_link
from ringreduce.ops import Min


class Part(NamedTuple):
    """An array of a model."""

    name: str
    data: Any  # its bytes
    flags: int = TRAINS | OWNED


class Divergence:
    """Compares what the ranks of an optimizer's process set have.

    every: reductions between two comparisons.  parts: returns what is compared.
    """

    def __init__(self, every: int, process_set: ProcessSet, parts: Callable[[], Iterable[Part]]) -> None:
        self._every, self._set, self.parts = every, process_set, parts
        self._name = ""  # of its operations: another one for each optimizer
        self._counts: Counter[str] = Counter()
        self._reductions = self._steps = 0
        self._equal_at: dict[int, int] = {}  # after how many steps the parameters (0), or the BUFFERs, were equal
        self._reported: set[int] = set()
        self._names: dict[int, str] = {}  # by fingerprint
        self._rows: list[list[int]] = []
        """What is being compared: rank, name, fingerprint, flags; 0 names the number of steps."""
        self._pending: tuple[Callable[[Any], object], Handle] | None = None

    def begin(self) -> None:
        """Gradients are about to be reduced: the first time, compare, and wait for the others."""
        if not self._reductions:
            self._reductions = 1
            self._compare()
            self._look(waits=True)

    def reduced(self, names: Iterable[str]) -> None:
        """Gradients of these names have arrived; a name that comes again means another step."""
        self._counts.update(names)
        newest = max(self._counts.values(), default=0)
        if newest > self._reductions:
            self._reductions = newest
            self._look(waits=True)  # all ranks have begun it: they gave what has arrived here after that
            if (newest - 1) % self._every == 0:
                self._compare()

    def stepped(self, waits: bool = False) -> None:
        """The optimizer has stepped.  waits: all ranks call this where they do."""
        self._steps += 1
        self._look(waits)

    def _look(self, waits: bool = False) -> None:
        while self._pending and (waits or self._pending[1].poll()):
            (then, handle), self._pending = self._pending, None
            then(handle.wait())

    def _compare(self) -> None:
        at, rank = self._reductions - 1, runtime.current("check").world.rank
        parts = list(self.parts())
        if not self._name:
            owned = sorted((each.name, len(each.data)) for each in parts if each.flags & OWNED)
            self._name = f"check.divergence.{fingerprint(repr(owned).encode()):x}"
        self._names = {fingerprint(each.name.encode()): each.name for each in parts}
        own = zip(self._names, parts, strict=True)
        self._rows = [[rank, name, fingerprint(each.data), each.flags] for name, each in own]
        wholes = []
        for kind in (0, BUFFER):
            rows = sorted(row[1:] for row in self._rows if row[3] & BUFFER == kind)
            wholes.append(fingerprint(np.array(rows, np.int64).tobytes()))
        self._rows.append([rank, 0, self._steps, 0])
        ends = np.array([wholes, [~each for each in wholes]])
        handle = allreduce_async(ends, name=self._name, op=Min, process_set=self._set)
        self._pending = (lambda least: self._compared(at, *least.tolist())), handle

    def _compared(self, at: int, least: list[int], most: list[int]) -> None:
        """least, most: of all ranks' fingerprints, of parameters and of buffers; the complements of the second."""
        differ = {kind for kind, low, high in zip((0, BUFFER), least, most, strict=True) if low != ~high}
        news = differ - self._reported
        self._reported |= news
        if news:
            rows = np.array(self._rows)
            handle = allgather_async(rows, name=f"{self._name}.all", process_set=self._set)
            equal_at = dict(self._equal_at)
            self._pending = (lambda rows: self._report(news, equal_at, at, rows.tolist())), handle
        self._equal_at |= dict.fromkeys({0, BUFFER} - differ, at)

    def _report(self, kinds: set[int], equal_at: dict[int, int], at: int, rows: list[list[int]]) -> None:
        if self._set.rank() != 0:
            return
        steps = {rank: value for rank, name, value, _ in rows if name == 0}
        compared: blame.Compared = {}
        for rank, name, value, flags in rows:
            if name:
                known = self._names.get(name, f"one that rank 0 lacks, {name:x}")
                compared.setdefault(known, {})[rank] = value, flags
        for kind in sorted(kinds):
            text = f"check=divergence: {blame.text(compared, kind, equal_at.get(kind), at, steps)}"
            LOGGER.error(text)
            launcher_link.report(runtime.current("check").settings.error_file, finding=text)


_of_optimizers: weakref.WeakKeyDictionary[Any, tuple[Any, Divergence]] = weakref.WeakKeyDictionary()


def compare(optimizer: Any, process_set: ProcessSet, tree: Callable[[], Any]) -> None:
    """Compare arrays of an optimizer that is about to reduce all gradients, and to step; called by all ranks.

    tree: returns the arrays, in any nesting; what is none of at least one dimension, in host memory, is left out.
    """
    current = runtime.current("check")
    if not current.checks.divergence:
        return

    def parts() -> Iterable[Part]:
        arrays = [(name, as_buffer(each)) for name, each in trees.leaves(tree()) if getattr(each, "shape", ())]
        return [Part(name, each.flat.view(np.uint8)) for name, each in arrays if not each.on_gpu]

    made_for = current.engine, current.checks.divergence
    if optimizer not in _of_optimizers or _of_optimizers[optimizer][0] != made_for:
        _of_optimizers[optimizer] = made_for, Divergence(current.checks.divergence, process_set, parts)
    divergence = _of_optimizers[optimizer][1]
    divergence.parts = parts
    divergence.begin()
    divergence.reduced([""])
    divergence.stepped(waits=True)
