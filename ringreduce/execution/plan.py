"""What an engine remembers of an operation, so that repeating it needs no checks and no new decisions.

Like MPI's persistent collectives, but found by name. A plan holds no array and no address: a call's types, shapes and
devices are compared with it each time, so a plan is never out of date. It ends with its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import ElementType
from ringreduce.collectives.ops import ReduceOp, Reduction
from ringreduce.errors import InputError
from ringreduce.execution.signature import Signature, names_of, sign

MOST_PLANS = 32768  # that are kept


class Plan:
    """What is kept of one operation in one process set or channel, on one rank."""

    __slots__ = ("_reductions", "id", "is_whole", "key", "signature", "submitted", "travels", "way")

    def __init__(self, signature: Signature) -> None:
        """signature: without its number, where it is of unnamed submissions."""
        self.signature, self.key = signature, signature.key
        self.id: int | None = None
        """The id by which it is announced, from negotiation/cache.py; None: by a record."""
        self.is_whole = False
        """It describes what is moved, not only what ranks compare: so `way` and `travels` may be kept."""
        self.submitted = 0  # how often, where that is counted
        self.way: Any = None  # see allreduce.Way
        self.travels: tuple[Reduction | None] | None = None  # see allreduce.travelling
        self._reductions: dict[tuple[ElementType, int], Reduction] = {}

    def reduction(self, element: ElementType, divisor: int) -> Reduction:
        """One object for equal reductions: it keeps what it has found out about itself."""
        found = self._reductions.get((element, divisor))
        if found is None:
            of = dict(self.signature.details)
            found = Reduction(ReduceOp(of["op"]), element, divisor, of["prescale_factor"], of["postscale_factor"])
            self._reductions[element, divisor] = found
        return found


class Plans:
    """The plans of one engine."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._last: dict[str | None, tuple[list[Any], Plan]] = {}
        """By name, the last operation and its plan: comparing it takes half as long as hashing it."""

    def find(
        self,
        process_set: int,
        kind: str,
        name: str | None,
        known_as: str,
        tensors: Sequence[Buffer],
        details: tuple[tuple[str, Any], ...],
        names: tuple[str, ...] | None,
        by_rows: bool,
        is_whole: bool,
        check: Callable[[Buffer], object],
        together: Callable[[Sequence[Buffer]], object] | None = None,
    ) -> Plan:
        """The plan of an operation on these tensors; a new one is checked first. Parameters as in Submitting.submit.

        known_as: the name in its signature.  is_whole: the tensors are the inputs themselves.
        """
        described: list[Any] = [process_set, kind, name, names, details, by_rows, is_whole]
        for each in tensors:
            described += each.element, each.shape[1:] if by_rows else each.shape, each.device
        last = self._last.get(name)
        if last is not None and last[0] == described:
            return last[1]
        key = tuple(described)
        plan = self._plans.get(key)
        if plan is None:
            for number, each in enumerate(tensors):
                try:
                    check(each)
                except InputError as exc:
                    exc.at = number
                    raise
            if together is not None:
                together(tensors)
            own = zip(tensors, names_of(known_as, names, len(tensors)), strict=True)
            signed = tuple([sign(each, one, each.shape[1:] if by_rows else None) for each, one in own])
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
                self._last.clear()
            plan = self._plans[key] = Plan(Signature(kind, known_as, signed, details))
            plan.is_whole = is_whole and not by_rows
        self._last[name] = described, plan
        return plan
