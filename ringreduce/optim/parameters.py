"""The names and the groups of an optimizer's parameters."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ringreduce.errors import InputError
from ringrun.text import listed

Named = list[tuple[str, Any]]


def name_parameters(
    groups: Sequence[Sequence[Any]], named_parameters: Iterable[tuple[str, Any]] | None
) -> tuple[Named, Named]:
    """The parameters of an optimizer's groups with their names, numbered by default; and the others that have a name.

    Parameters are told apart by identity: of several names of one, as tied weights have, the first is taken.
    Raises: InputError for a missing name, or an equal one.
    """
    owned = [parameter for group in groups for parameter in group]
    if named_parameters is None:
        return [(f"parameter.{number}", parameter) for number, parameter in enumerate(owned)], []
    named = list(named_parameters)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in named):
        raise InputError("named_parameters: expected (name, parameter) pairs, such as model.named_parameters()")
    named = [(str(name), parameter) for name, parameter in named]  # enumerate() gives numbers
    counts = collections.Counter(name for name, _ in named)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise InputError(f"named_parameters: names must differ; given more than once: {', '.join(duplicates)}")
    named_ids = {id(parameter): name for name, parameter in named[::-1]}
    unnamed = [
        f"param_groups[{number}]['params'][{index}] of shape {tuple(parameter.shape)}"
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group)
        if id(parameter) not in named_ids
    ]
    if unnamed:
        have = "has no name" if len(unnamed) == 1 else "have no names"
        raise InputError(
            f"named_parameters: {len(unnamed)} of the optimizer's {len(owned)} parameters {have} in it: "
            f"{listed(unnamed)}; pass the names of all parameters that the optimizer has"
        )
    first = [(name, parameter) for name, parameter in named if named_ids[id(parameter)] == name]
    owned_ids = {id(parameter) for parameter in owned}
    mine, others = ([pair for pair in first if (id(pair[1]) in owned_ids) is owns] for owns in (True, False))
    return mine, others


def group_parameters(named: Named, groups: int | Sequence[Sequence[Any]] | None) -> list[list[Any]]:
    """The parameters of each group: of so many equal ones, or of the given ones; none for 0 and None.

    Raises: InputError when a parameter is none of the optimizer's, or in two groups.
    """
    if groups is None:
        return []
    if isinstance(groups, int | np.integer) and groups >= 0:
        parameters = [parameter for _, parameter in named]
        count = min(groups, len(parameters))
        ends = [number * len(parameters) // count for number in range(count + 1)] if count else []
        return [parameters[start:end] for start, end in itertools.pairwise(ends)]
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise InputError(f"groups={groups!r}; expected a number of 0 or more, or lists of parameters")
    owned = {id(parameter) for _, parameter in named}
    seen: set[int] = set()
    for parameter in (each for group in groups for each in group):
        if not hasattr(parameter, "shape"):
            raise InputError(f"groups: a {type(parameter).__qualname__}; expected lists of parameters")
        if id(parameter) not in owned:
            raise InputError(f"groups: a tensor of shape {tuple(parameter.shape)} is not a parameter of the optimizer")
        if id(parameter) in seen:
            raise InputError(f"groups: a parameter of shape {tuple(parameter.shape)} is in two places; expected one")
        seen.add(id(parameter))
    return [list(group) for group in groups]
