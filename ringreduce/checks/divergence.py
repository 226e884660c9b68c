"""Do all ranks have the same parameters? They compare fingerprints every so many steps; blame.py says who differs.

    before the first gradient   a rank that has frozen a parameter would not take part in its reduction
      Keras', a tape's: names   values at the second: they may be broadcast after the first step only
    every N reductions          the parameters as they are then, before that step
      one all-reduce            of 14 numbers: are all arrays equal, and all values that steer, such as learning rates?
      if not: another one       of what each rank has, by name

What has been reported is compared apart from the rest, so it hides nothing that begins to differ later; where it is
found equal again it is forgotten. All-reduces, as ranks that have joined take part in them. But for the first time
nobody waits for a rank that is late: see comparison.py.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet
from ringreduce.arrays import trees
from ringreduce.arrays.view import as_buffer
from ringreduce.checks import blame
from ringreduce.checks.blame import KINDS, NUMBER, OWNED, TRAINS, kind_of
from ringreduce.checks.comparison import Comparison
from ringreduce.collectives.ops import Max, Min
from ringreduce.errors import UnsupportedArrayError
from ringreduce.kernels.fingerprint import fingerprint
from ringreduce.monitor import launcher_link
from ringreduce.settings.log import JOB

MOST_REPORTS = 10
"""From that one on each report doubles the steps to the next comparison: what differs anew for ever fills no disk."""
_GROUPS = [(kind, is_known) for kind in KINDS for is_known in (False, True)]


class Part(NamedTuple):
    """What all ranks should have alike.

    read: returns a number, or an array's bytes, as `fingerprint` takes them; what raises is not compared.
    """

    name: str
    read: Callable[[], Any]
    flags: int = TRAINS | OWNED


def parts_of(tree: Any) -> list[Part]:
    """The arrays and the numbers of nested dicts, lists and tuples; other leaves are left out."""
    leaves = [(name, leaf) for name, leaf in trees.leaves(tree) if hasattr(leaf, "shape") or _is_number(leaf)]
    return [Part(name, functools.partial(_number_or_bytes, leaf)) for name, leaf in leaves]


def part_of(name: str, array: Callable[[], Any], flags: int) -> Part:
    """One of what a function returns, a NumPy array: of a NUMBER its only element, else its bytes."""
    return Part(name, lambda: array().item() if flags == NUMBER else _bytes(array()), flags)


def numbered(number: int, path: str) -> str:
    """A variable's name, such as "3.sequential/dense/kernel": how many layers a rank has made is no part of it."""
    return f"{number}.{re.sub('_[0-9]+', '', path)}"


def _bytes(array: Any) -> Any:
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.char in "gG":  # of a long double's 16 bytes 6 are anything: as two float64, whose sum it is
        whole = flat.view(np.longdouble)
        with np.errstate(all="ignore"):
            high = whole.astype(np.float64)
            flat = np.concatenate([high, (whole - high).astype(np.float64)])
    return flat.view(np.uint8)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex)


def _number_or_bytes(leaf: Any) -> Any:
    if _is_number(leaf) or isinstance(leaf, np.generic):
        return leaf.item() if isinstance(leaf, np.generic) else leaf
    buffer = as_buffer(leaf)
    if buffer.on_gpu:
        raise UnsupportedArrayError("it is on a GPU")
    return _bytes(leaf if isinstance(leaf, np.ndarray) else buffer.flat)


class Divergence(Comparison):
    """Compares what the ranks of an optimizer's process set have.

    every: steps between two comparisons.  parts: returns what is compared; names may come twice.
    steps_each: how many steps there are from one reduction to the next.
    first: how many reductions come before the first comparison; before them, parameters' names are compared.

    What cannot be read is left out, with a warning.
    """

    says = "check=divergence"

    def __init__(
        self,
        every: int,
        process_set: ProcessSet,
        parts: Callable[[], Iterable[Part]],
        steps_each: int = 1,
        first: int = 0,
    ) -> None:
        super().__init__(process_set)
        self._every, self._first = max(1, every // steps_each), first  # reductions
        self.parts, self._steps_each = parts, steps_each
        self._reports = 0
        self._equal_at: dict[int, int] = {}  # after how many steps all of a kind, but for what is known, were equal
        self._known: dict[str, int] = {}  # what was reported, with its kind; alike on all ranks
        self._found: dict[str, tuple[int, str]] = {}  # what this rank has: flags and fingerprint, or number, by name
        self._record = b""  # of it what is not known, for the others
        self._has_warned = False

    def _begin(self, names: Iterable[str]) -> None:
        """Compare, and wait for the others, as this is the first time."""
        self._name = self._unused_name(() if self._first else names)  # which may be what ranks have differently
        self._compare()
        self._look(waits=True)

    def _is_due(self) -> bool:
        since = self._reductions - 1 - self._first
        return since >= 0 and since % self._every == 0

    def _read(self) -> None:
        """Find out what this rank has."""
        self._found, odd = {}, []
        by_name = self._reductions <= self._first
        parts = (Part(each.name, lambda: b"", each.flags) for each in self.parts() if each.flags & TRAINS)
        for name, read, flags in parts if by_name else self.parts():
            try:
                value = read()
                found = (NUMBER, repr(value)) if _is_number(value) else (flags, f"{fingerprint(value):x}")
            except Exception as exc:  # of anyone's array
                odd.append(f"{name!r}: {str(exc).partition('. ')[0]}")
                continue
            names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
            self._found[next(each for each in names if each not in self._found)] = found
        if odd:
            self.warn(f"{len(odd)} of an optimizer's arrays cannot be compared; the first is {odd[0]}")

    def warn(self, text: str) -> None:
        """Say it once."""
        if not self._has_warned and self._set.rank() == 0:
            JOB.warning(f"check=divergence: {text}")
        self._has_warned = True

    def _compare(self) -> None:
        at, rank, can = (self._reductions - 1) * self._steps_each, runtime.current("check").world.rank, 1
        try:
            self._read()
        except Exception as exc:  # of the user's own classes; the other ranks wait for this one
            JOB.warning(f"check=divergence ends: rank {rank} cannot read what to compare: {exc!r}")
            can = 0
        wholes = [fingerprint(repr(sorted(self._of(*group).items())).encode()) for group in _GROUPS]
        unknown = {name: each for name, each in self._found.items() if name not in self._known}
        self._record = json.dumps([rank, self._steps * self._steps_each, unknown]).encode()
        numbers = np.array([*wholes, *(~each for each in wholes), -len(self._record), can])
        self._submit(numbers, Min, lambda least: self._compared(at, least.tolist()))

    def _of(self, kind: int, is_known: bool) -> dict[str, tuple[int, str]]:
        found = self._found.items()
        return {name: each for name, each in found if kind_of(each[0]) == kind and (name in self._known) == is_known}

    def _compared(self, at: int, least: list[int]) -> None:
        """least: of all ranks' fingerprints, of their complements, and the end of `_compare`'s numbers."""
        *ends, longest, can = least
        if not can:
            self._has_ended = True
            return
        lows, highs = ends[: len(_GROUPS)], ends[len(_GROUPS) :]
        equal = {group for group, low, high in zip(_GROUPS, lows, highs, strict=True) if low == ~high}
        self._known = {name: kind for name, kind in self._known.items() if (kind, True) not in equal}
        news = [kind for kind in KINDS if (kind, False) not in equal]
        if news:
            records = np.zeros((self._set.size() or 1, -longest), np.uint8)
            records[self._set.rank(), : len(self._record)] = np.frombuffer(self._record, np.uint8)
            equal_at = self._equal_at
            self._submit(records, Max, lambda records: self._report(news, equal_at, at, records), ".all")
        if self._reductions > self._first:
            self._equal_at = dict.fromkeys(KINDS, at)  # what is reported now is known from now on

    def _report(self, kinds: list[int], equal_at: dict[int, int], at: int, records: Any) -> None:
        steps: dict[int, int] = {}
        compared: blame.Compared = {}
        for record in filter(None, (row.tobytes().rstrip(b"\0") for row in records)):  # a joined rank's is empty
            rank, steps[rank], found = json.loads(record)
            for name, (flags, value) in found.items():
                compared.setdefault(name, {})[rank] = value, flags
        self._reports += 1
        if self._reports >= MOST_REPORTS:
            self._every *= 2
        current = runtime.current("check")
        for kind in kinds:
            differing = blame.differing(compared, kind, steps)
            self._known |= dict.fromkeys(differing, kind)
            if differing and current.world.rank == min(steps):
                text = f"check=divergence: {blame.text(compared, kind, equal_at.get(kind), at, steps)}"
                JOB.error(text)
                launcher_link.report(current.settings.error_file, finding=text)


_of_optimizers: weakref.WeakKeyDictionary[Any, tuple[Any, Divergence]] = weakref.WeakKeyDictionary()
_compiled: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_from_second_step: weakref.WeakSet[Any] = weakref.WeakSet()


def compare(optimizer: Any, process_set: ProcessSet, tree: Callable[[], Any], steps_each: int = 1) -> None:
    """As `compare_parts`.  tree: returns arrays and numbers, in any nesting; see `parts_of`."""

    def parts() -> list[Part]:
        if not (found := parts_of(tree())):
            none = "an optimizer passes no parameters and has no arrays as attributes: nothing of it is compared"
            _of_optimizers[optimizer][1].warn(none)
        return found

    compare_parts(optimizer, process_set, parts, steps_each=steps_each)


def compare_parts(
    optimizer: Any,
    process_set: ProcessSet,
    parts: Callable[[], Iterable[Part]],
    names: Iterable[str] = (),
    steps_each: int = 1,
) -> None:
    """Compare what an optimizer has that is about to reduce all gradients, and to step; called by all ranks.

    optimizer: whatever stands for it.  names: of the gradients; see `Comparison.begin`.
    steps_each: how many steps there are from one call to the next.
    """
    current = runtime.current("check")
    if not current.checks.divergence:
        return
    made_for = current.engine, current.checks.divergence
    if optimizer not in _of_optimizers or _of_optimizers[optimizer][0] != made_for:
        first = int(optimizer in _from_second_step)
        divergence = Divergence(current.checks.divergence, process_set, list, steps_each, first)
        _of_optimizers[optimizer] = made_for, divergence
    divergence = _of_optimizers[optimizer][1]
    divergence.parts = parts
    divergence.in_order(names)
    divergence.parts = list  # those arrays may be gone after this step


def compare_from_second_step(optimizer: Any) -> None:
    """Leave out what an optimizer has before its first: where that makes the variables, they are broadcast after it."""
    _from_second_step.add(optimizer)


def compares(optimizer: Any, in_program: bool) -> bool:
    """Whether an optimizer compares now, or in a program that is being compiled.

    All its programs do as the first one: if the check is switched on later, not all ranks compile anew.
    """
    now = bool(runtime.current("check").checks.divergence)
    return _compiled.setdefault(optimizer, now) if in_program else now
