"""Process sets: collectives among some of the ranks."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce import runtime
from ringreduce.errors import InputError
from ringreduce.execution.errors_for import unknown_set
from ringreduce.negotiation.protocol import GLOBAL
from ringreduce.runtime import lifecycle
from ringreduce.runtime.submit import Made, refused, submit_and_wait

__all__ = ["ProcessSet", "add_process_set", "get_process_set_ids_and_ranks", "global_process_set"]
__all__ += ["host_process_set", "remove_process_set"]


class ProcessSet:
    """A subset of the ranks for collectives: pass it as `process_set=`.

    ranks_or_comm: ranks of the world in any order, or an mpi4py communicator of them. Each rank passes its own
        communicator, such as its part of a COMM_WORLD.Split(); all parts become process sets.

    Pass it to `init(process_sets=[...])` or `add_process_set()` before use.
    Source: Horovod's ProcessSet.
    """

    process_set_id: int | None = None
    """Its number, the same on all ranks; None before it was added and after it was removed."""
    ranks: list[int] | None = None
    """Its members, in rising order; None for a communicator that init() has not seen yet."""
    comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        if hasattr(ranks_or_comm, "Get_group"):
            self.comm = ranks_or_comm
        else:
            try:
                self.ranks = sorted(map(operator.index, ranks_or_comm))
            except TypeError:
                expected = "expected ranks, such as [0, 1], or an mpi4py communicator"
                raise InputError(f"ProcessSet: {ranks_or_comm!r}; {expected}") from None

    @property
    def mpi_comm(self) -> Any:
        """Horovod's name for the communicator of which it was made, if it was."""
        return self.comm

    def size(self) -> int | None:
        """The number of its ranks; None when it was not added."""
        return None if self.ensure() is None else len(self._members())

    def rank(self) -> int | None:
        """This rank's number in it, from 0; None when it was not added, or this rank is not in it."""
        if self.ensure() is None or not self.included():
            return None
        return self._members().index(runtime.current_world("rank").rank)

    def included(self) -> bool:
        """True when this rank is in it; raises NotInitializedError before init()."""
        return runtime.current_world("included").rank in self._members()

    def ensure(self) -> int | None:
        """Return its number, None where it was not added. For this package.

        Cost: for `host_process_set`, which is made when a world first needs it, an agreement of all ranks.
        """
        return self.process_set_id

    def _members(self) -> list[int]:
        if (number := self.ensure()) is not None and runtime.is_initialized():  # in an elastic job numbered anew
            return list(runtime.current("process sets").engine.process_sets.sets.get(number, ()))
        return self.ranks or []

    def _check_world(self, function: str) -> None:
        """Raise InputError where it has ended with the world in which it was made."""

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks of the current world."""

    process_set_id = GLOBAL

    def __init__(self) -> None:
        pass

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        """All ranks; None before init()."""
        return self._members() if runtime.is_initialized() else None

    def size(self) -> int | None:
        """The number of ranks; None before init()."""
        return runtime.current("size").world.size if runtime.is_initialized() else None

    def rank(self) -> int | None:
        """This rank; None before init()."""
        return runtime.current("rank").world.rank if runtime.is_initialized() else None

    def _members(self) -> list[int]:
        return list(range(runtime.current_world("included").size))

    def __reduce__(self) -> str:
        return "global_process_set"  # there is one: a copy is itself

    __repr__ = __reduce__


global_process_set: ProcessSet = _GlobalProcessSet()
"""All ranks of the current world; number 0."""


class _HostProcessSet(ProcessSet):
    """The ranks of this rank's host in the current world; each host has one, made by all ranks at the first use."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by engine

    @property
    def process_set_id(self) -> int | None:  # type: ignore[override]
        """Its number; None before its first use in a world."""
        return self._numbers.get(runtime.current("host_process_set").engine) if runtime.is_initialized() else None

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        """The ranks of this host, before its first use, too; None before init()."""
        if not runtime.is_initialized():
            return None
        world = runtime.current("host_process_set").world
        return [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]

    def ensure(self) -> int | None:
        """Make the sets of all hosts at the first call in a world, to which all ranks must come; None before init()."""
        if not runtime.is_initialized():
            return None
        own = runtime.current("host_process_set")
        if own.engine not in self._numbers:
            for host in dict.fromkeys(own.world.hosts):
                made = set_of([rank for rank, its in enumerate(own.world.hosts) if its == host])
                if host == own.world.hosts[own.world.rank]:
                    self._numbers[own.engine] = made.process_set_id or GLOBAL
        return self._numbers[own.engine]

    def __reduce__(self) -> str:
        return "host_process_set"

    __repr__ = __reduce__


host_process_set: ProcessSet = _HostProcessSet()
"""The ranks of this rank's host in the current world; all ranks create it at the first use."""


def number_of(process_set: ProcessSet, function: str) -> int:
    """The engine's number of a set; raises InputError when it was not added."""
    if process_set is global_process_set:
        return GLOBAL
    if not isinstance(process_set, ProcessSet):
        raise _no_set(function, process_set)
    number = process_set.ensure()
    if number is None:
        raise InputError(
            f"{function}: {process_set!r} was not added, or was removed; pass it to init(process_sets=[...]), or call "
            "add_process_set() on all ranks"
        )
    process_set._check_world(function)
    return number


def takes_part(process_set: ProcessSet, function: str) -> bool:
    """Whether this rank is in a set; raises InputError where it was not added, was removed, or ended with a world."""
    number, current = number_of(process_set, function), runtime.current(function)
    sets, rank = current.engine.process_sets, current.world.rank
    if (members := sets.sets.get(number)) is None:
        raise unknown_set(function, number, sets.sets, rank, sets.gone)
    return rank in members


def placed(function: str, name: str | None, process_set: ProcessSet, make: Callable[..., Made], *given: Any) -> Made:
    """What `make` makes of what a call of the function is given, before it is submitted.

    Where it raises, the call keeps its place, so that the others' calls fail and their later ones meet this rank's.
    """
    try:
        return make(*given)
    except Exception as exc:
        raise refused(function, exc, number_of(process_set, function), name) from exc.__cause__


def _no_set(function: str, process_set: object) -> InputError:
    return InputError(f"{function}: process_set={process_set!r}; expected a ProcessSet")


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Add a process set; every rank must call it, members or not, in the same order.

    Returns: the set, which can be used from now on.
    Cost:    one agreement.
    Raises:  InputError (a ValueError) when a set of these ranks exists already, a rank does not exist, or sets are not
             dynamic: init(process_sets="dynamic") or RINGREDUCE_DYNAMIC_PROCESS_SETS=1 (or Horovod's name for it)
             allow this; MismatchError when ranks pass different ones.
    Source:  Horovod's add_process_set.
    """
    current = runtime.current("add_process_set")
    return _added(*placed("add_process_set", None, global_process_set, _new, current, process_set))


def _new(current: runtime.Runtime, process_set: ProcessSet | Sequence[int]) -> tuple[ProcessSet, tuple[int, ...]]:
    """A set that may be added, and its members."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.comm is not None:
        process_set.ranks = current.world.ranks_of(process_set.comm)
    members = lifecycle.check_members(process_set.ranks or [], current.world.size)
    _check_dynamic(current, "add_process_set")
    if (number := _number(members)) is not None:
        raise InputError(f"add_process_set: process set {number} already has the ranks {list(members)}; use that one")
    return process_set, members


def set_of(ranks: Sequence[int]) -> ProcessSet:
    """The process set of these ranks, which is added where there is none; every rank must call it. For this package."""
    process_set, members = ProcessSet(ranks), tuple(ranks)
    if (number := _number(members)) is None:
        return _added(process_set, members)
    process_set.process_set_id = number
    return process_set


def _number(members: tuple[int, ...]) -> int | None:
    """Of the set that has these members."""
    sets = runtime.current("process sets").engine.process_sets.sets
    return next((number for number, others in sets.items() if others == members), None)


def _added(process_set: ProcessSet, members: tuple[int, ...]) -> ProcessSet:
    number = submit_and_wait("add_process_set", details=(("ranks", members),))
    process_set.process_set_id, process_set.ranks = number, list(members)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set; every rank must call it.

    Operations on it that its members have agreed to run complete first; all others fail, on all members.

    Returns: True when it was removed; False when it was not added, or is the global one.
    Raises:  InputError (a ValueError) when sets are not dynamic; MismatchError when ranks pass different ones.
    Source:  Horovod's remove_process_set.
    """
    current = runtime.current("remove_process_set")
    if not isinstance(process_set, ProcessSet):
        raise _no_set("remove_process_set", process_set)
    number = process_set.process_set_id
    if number is None or number == GLOBAL:
        return False
    _check_dynamic(current, "remove_process_set")
    submit_and_wait("remove_process_set", details=(("process_set", number),))
    process_set.process_set_id = None
    return True


def _check_dynamic(current: runtime.Runtime, function: str) -> None:
    if not current.settings.dynamic_process_sets:
        raise InputError(
            f"{function}: process sets are fixed; set RINGREDUCE_DYNAMIC_PROCESS_SETS=1 "
            '(or HOROVOD_DYNAMIC_PROCESS_SETS=1), or call init(process_sets="dynamic")'
        )


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """All process sets, by number, with their ranks."""
    sets = runtime.current("process sets").engine.process_sets.sets
    return {number: list(members) for number, members in sets.items()}
