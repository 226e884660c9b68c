"""The names and the groups of an optimizer's parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ringreduce.errors import InputError

Named = list[tuple[str, Any]]


def name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> Named:
    """The optimizer's parameters with their names; raises InputError when a name is missing or given twice."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
        return list(zip(names or [f"parameter.{number}" for number in range(len(owned))], owned, strict=True))
    named = list(named_parameters)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in named):
        raise InputError("named_parameters: expected (name, parameter) pairs, such as model.named_parameters()")
    names = [name for name, _ in named]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InputError(f"named_parameters: names must differ; given more than once: {', '.join(duplicates)}")
    named_ids = {id(parameter) for _, parameter in named}
    unnamed = sum(id(parameter) not in named_ids for parameter in owned)
    if unnamed:
        raise InputError(f"named_parameters: {unnamed} of the optimizer's {len(owned)} parameters have no name in it")
    owned_ids = {id(parameter) for parameter in owned}
    return [(name, parameter) for name, parameter in named if id(parameter) in owned_ids]


def number_of_groups(num_groups: int, groups: Any) -> Any:
    """`groups`, by its older name too."""
    if not isinstance(num_groups, int) or num_groups < 0:
        raise InputError(f"num_groups={num_groups!r}; expected 0 or more")
    if num_groups:
        warnings.warn("num_groups is deprecated; pass groups", DeprecationWarning, stacklevel=4)
    return groups if groups is not None else num_groups


def group_parameters(named: Named, groups: int | Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
    """The parameters of each group; raises InputError when one is none of the optimizer's, or in two groups."""
    if isinstance(groups, int) and groups >= 0:
        parameters = [parameter for _, parameter in named]
        count = min(groups, len(parameters))
        return [
            parameters[number * len(parameters) // count : (number + 1) * len(parameters) // count]
            for number in range(count)
        ]
    if not isinstance(groups, list | tuple) or not all(isinstance(group, list | tuple) for group in groups):
        raise InputError(f"groups={groups!r}; expected a number of 0 or more, or lists of parameters")
    owned = {id(parameter) for _, parameter in named}
    seen: set[int] = set()
    for parameter in (each for group in groups for each in group):
        if not isinstance(parameter, torch.Tensor):
            raise InputError(f"groups: a {type(parameter).__qualname__}; expected lists of parameters (torch.Tensor)")
        if id(parameter) not in owned:
            raise InputError(f"groups: a tensor of shape {tuple(parameter.shape)} is no parameter of the optimizer")
        if id(parameter) in seen:
            raise InputError(f"groups: a parameter of shape {tuple(parameter.shape)} is in two places; expected one")
        seen.add(id(parameter))
    return [list(group) for group in groups]


def name_newest_group(param_groups: list[dict[str, Any]], taken: set[str]) -> Named:
    """The parameters of the last group with their names; raises InputError when another parameter has the name."""
    number = len(param_groups) - 1
    group = param_groups[number]
    parameters = group["params"]
    names = group.get("param_names") or [f"group.{number}.parameter.{index}" for index in range(len(parameters))]
    doubled = sorted(taken.intersection(names))
    if doubled:
        raise InputError(f"add_param_group: names must differ; other parameters have these: {', '.join(doubled)}")
    return list(zip(names, parameters, strict=True))
