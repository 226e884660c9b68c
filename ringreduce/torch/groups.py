"""Which parameters an optimizer's groups have, what each is called, and what of that has changed by itself.

The groups are the user's: a script replaces a parameter there, appends one, assigns a new list of groups, or adds a
group to the object that was wrapped. None of that calls anything of ours, so every step looks.
"""

from __future__ import annotations

import itertools
import logging
import operator
import weakref
import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ringreduce.errors import InputError
from ringreduce.execution.signature import calling_line
from ringreduce.optim.parameters import Named
from ringreduce.settings.log import JOB
from ringrun.text import listed

_PARAMETERS = operator.itemgetter("params")
MOST_NAMES = 20  # in the text of a change; more are told apart by a checksum


def groups_of(optimizer: torch.optim.Optimizer) -> Groups | None:
    """Those of an optimizer that was wrapped; None of another one."""
    reducer = vars(optimizer).get("_reducer")
    return vars(optimizer).get("_local_groups") if reducer is None else reducer.owned


def in_order_of(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state_dict with its parameters in the order in which this optimizer has them, where both have torch's names.

    Raises: InputError where the names are not the same.
    """
    groups, lives = state_dict["param_groups"], optimizer.param_groups
    there, here = ([name for group in each for name in group.get("param_names", ())] for each in (groups, lives))
    numbers = [number for group in groups for number in group["params"]]
    if not (there and here) or there == here or len(there) != len(numbers) or len(groups) != len(lives):
        return state_dict
    if differing := sorted(set(there) ^ set(here)):
        who = "the state_dict" if differing[0] in there else "this optimizer"
        raise InputError(f"load_state_dict: only {who} has a parameter {differing[0]!r}; expected the same names")
    number_of = {name: number for number, name in enumerate(here)}
    moved = {number: number_of[name] for number, name in zip(numbers, there, strict=True)}
    both = zip(groups, (group["param_names"] for group in lives), strict=True)
    return {
        **state_dict,
        "state": {moved.get(key, key): value for key, value in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [number_of[each] for each in names], "param_names": list(names)}
            for group, names in both
        ],
    }


class Change(NamedTuple):
    """What has changed since the last look."""

    new: Named  # with their names
    gone: list[tuple[str, torch.Tensor]]
    came_by_itself: bool  # not by our add_param_group alone

    @property
    def replaced(self) -> set[str]:
        """The names that other parameters have now."""
        return {name for name, _ in self.new} & {name for name, _ in self.gone}

    def __str__(self) -> str:
        """The same on all ranks where they have changed alike, in whatever order."""
        replaced = self.replaced
        lines = [
            f"{name!r}, {_text(each)}, is " + ("in place of another one" if name in replaced else "new")
            for name, each in self.new
        ]
        lines = sorted(lines + [f"{name!r} is gone" for name, _ in self.gone if name not in replaced])
        checksum = f" ({zlib.crc32('; '.join(lines).encode()):08x})" if len(lines) > MOST_NAMES else ""
        text: str = listed(lines, MOST_NAMES)
        return text + checksum


class Groups:
    """The parameters of one optimizer's groups as they were at the last look.

    owned: the parameters that it has now, with their names.  others: further ones that the user has named.
    are_named: those of `owned` are the user's, too; else they say where each stands.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, owned: Named, others: Named, are_named: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._lists: list[list[torch.Tensor]] = []
        self._flat: list[torch.Tensor] = []
        self._added: set[int] = set()  # by our add_param_group, since the last look
        self.names = {id(parameter): name for name, parameter in owned}
        self._places = set() if are_named else {name for name, _ in owned}
        self._has_told = False
        self._others: dict[int, tuple[Any, str]] = {}
        self.remember(others)
        self._take(self._now())

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's own; none once it is gone."""
        optimizer = self._optimizer()
        return optimizer.param_groups if optimizer is not None else []

    def have_changed(self) -> bool:
        """Whether they have others than at the last look.

        Cost: no call of a Python function for each parameter; 9 us for 161 of them.
        """
        now = list(itertools.chain.from_iterable(self._now()))
        return len(now) != len(self._flat) or not all(map(operator.is_, now, self._flat))

    def change(self) -> Change:
        """What has changed; `take` makes it the last look."""
        lists = self._now()
        after = {id(parameter): parameter for parameter in itertools.chain.from_iterable(lists)}
        before = {id(parameter): parameter for parameter in self._flat}
        names = {key: name for key, name in self.names.items() if key in after}
        new = [(key, parameter) for key, parameter in after.items() if key not in names]
        taken = set(names.values())
        for key, parameter in new:
            names[key] = self._name(parameter, lists, after, taken)
            taken.add(names[key])
        gone = [(self.names[key], parameter) for key, parameter in before.items() if key not in after]
        by_itself = bool(gone) or any(key not in self._added for key, _ in new)
        return Change([(names[key], parameter) for key, parameter in new], gone, by_itself)

    def _name(
        self, parameter: torch.Tensor, lists: list[list[torch.Tensor]], after: dict[int, torch.Tensor], taken: set[str]
    ) -> str:
        """What a new parameter is called: the same on all ranks whose groups are alike."""
        places = ((n, index) for n, group in enumerate(lists) for index, each in enumerate(group) if each is parameter)
        number, index = next(places)
        groups = self.groups
        given = groups[number].get("param_names", ()) if number < len(groups) else ()
        older = self._lists[number] if number < len(self._lists) else []
        names = self.known_name(parameter) + ([given[index]] if len(given) == len(lists[number]) else [])
        if index < len(older) <= len(lists[number]) and id(older[index]) not in after:
            names.append(self.names[id(older[index])])  # of the one that stood in its place
        name = next((each for each in names if each not in taken), "")
        if not name:
            place = f"group.{number}.parameter.{index}"
            numbered = (f"{place}.{count}" for count in itertools.count(2))
            name = next(each for each in itertools.chain([place], numbered) if each not in taken)
            self._places.add(name)
        return name

    def known_name(self, parameter: torch.Tensor) -> list[str]:
        """The name that the user has given to this very parameter, or to the one in whose place it is; or none."""
        own = self.names.get(id(parameter))
        if own is not None:
            return [] if own in self._places else [own]
        reference, name = self._others.get(id(parameter), (lambda: None, ""))
        return [name] if reference() is parameter and name not in self._places else []

    def known(self) -> dict[str, torch.Tensor]:
        """All parameters, by name, also those that groups do not have."""
        others = [(name, reference()) for reference, name in self._others.values()]
        return {
            **{name: each for name, each in others if each is not None},
            **{self.names[id(each)]: each for each in self._flat},
        }

    def tell(self, change: Change, whose: str, done: str) -> None:
        """Say what has come or gone by itself: the first time as a warning, as a script may do so many times.

        whose, done: such as "gradients of ", "reduced".
        """
        if change.came_by_itself:
            level = logging.INFO if self._has_told else logging.WARNING
            then = [f"{whose}new parameters are {done} from now on"] if change.new else []
            if len(change.gone) > len(change.replaced):
                then.append(f"{whose}removed parameters are no longer {done}")
            what = f"{change} ({calling_line()}); {', '.join(then)}"
            JOB.log(level, f"param_groups was changed outside the optimizer: {what}")
            self._has_told = True

    def remember(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """What parameters are called that the groups do not have, should they come."""
        self._others |= {id(parameter): (weakref.ref(parameter), name) for name, parameter in named}

    def take(self, change: Change) -> None:
        """Make a change the last look."""
        for _, parameter in change.gone:
            del self.names[id(parameter)]
        self.remember(change.gone)
        self.names |= {id(parameter): name for name, parameter in change.new}
        self._take(self._now())

    def _take(self, lists: list[list[torch.Tensor]]) -> None:
        self._lists = [list(each) for each in lists]
        self._flat = list(itertools.chain.from_iterable(lists))
        self._added = set()

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Our own add_param_group has added these, so nobody need be told."""
        self._added |= {id(each) for each in parameters}

    def doubled(self, parameters: Iterable[torch.Tensor], names: Iterable[str]) -> list[str]:
        """Those of the names of these parameters that others have."""
        own = {id(each) for each in parameters}
        return sorted({name for key, name in self.names.items() if key not in own}.intersection(names))

    def _now(self) -> list[Any]:
        """The lists of the groups; LBFGS steps what is in one of its own, which is the first group's at first."""
        optimizer = self._optimizer()
        if optimizer is None:
            return self._lists
        lists = list(map(_PARAMETERS, optimizer.param_groups))
        own = getattr(optimizer, "_params", None)
        return [*lists, own] if isinstance(own, list) and not any(own is each for each in lists) else lists


def _text(parameter: torch.Tensor) -> str:
    """Such as float32[4, 3]."""
    return f"{parameter.dtype}{list(parameter.shape)}".removeprefix("torch.")
