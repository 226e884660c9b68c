"""An optimizer's options and state by the names of its parameters: to send, to commit, and to give to an optimizer.

A name is what all ranks have alike, and one attempt of a job and the next: parameters made from sets stand in another
order on each rank, and groups are added in the course of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ringreduce.api.world import rank
from ringreduce.arrays import trees
from ringreduce.errors import InputError
from ringreduce.runtime import is_initialized
from ringreduce.torch.groups import groups_of
from ringrun.text import listed

Modules = Mapping[str, torch.nn.Module]
"""By what the names of their parameters begin with."""


class Outline(NamedTuple):
    """An optimizer's options and state; nothing is copied."""

    names: list[list[str]]  # of each group's parameters
    shapes: dict[str, tuple[int, ...]]  # of parameters, by name
    options: list[dict[str, Any]]  # of each group, all but its parameters
    of_parameters: dict[str, Any]
    others: dict[Any, Any]  # state that belongs to no parameter, by its key
    parameters: dict[str, torch.Tensor]  # themselves; none where it has been sent, or committed


def outline_of(optimizer: torch.optim.Optimizer, modules: Modules) -> Outline:
    """What this optimizer has.  modules: the names of parameters that it does not know itself."""
    if getattr(optimizer, "is_sharded", False):
        outline: Outline = optimizer.outline()  # type: ignore[attr-defined]
        return outline
    names, parameters, groups = _names(optimizer, modules), _owned(optimizer, modules), optimizer.param_groups
    named = {id(parameter): name for name, parameter in parameters.items()}
    of_parameters, others = {}, {}
    for key, value in optimizer.state.items():
        if id(key) in named:
            of_parameters[named[id(key)]] = value
        else:
            others[key] = value
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    return Outline(names, shapes, options, of_parameters, others, parameters)


def _names(optimizer: torch.optim.Optimizer, modules: Modules) -> list[list[str]]:
    """Of each group's parameters: the user's, or else their places in the groups."""
    known, taken = _known(optimizer, modules), set[str]()

    def name_of(parameter: torch.Tensor, number: int, index: int, given: str) -> str:
        place = f"group.{number}.parameter.{index}"
        found = [*known(parameter), given, place]
        name = next((each for each in found if each and each not in taken), f"{place} again")
        taken.add(name)
        return name

    names = []
    for number, group in enumerate(optimizer.param_groups):
        parameters, given = group["params"], group.get("param_names", ())
        given = given if len(given) == len(parameters) else [""] * len(parameters)
        names.append([name_of(each, number, index, given[index]) for index, each in enumerate(parameters)])
    return names


def _known(optimizer: torch.optim.Optimizer, modules: Modules) -> Callable[[torch.Tensor], Iterator[str]]:
    """The names of a parameter, first the one that the user gave the optimizer."""
    groups, of_modules = groups_of(optimizer), dict[int, str]()

    def known(parameter: torch.Tensor) -> Iterator[str]:
        if groups is not None:
            yield from groups.known_name(parameter)
        if modules and not of_modules:
            of_modules.update({id(each): name for name, each in _of_modules(modules).items()})
        if id(parameter) in of_modules:
            yield of_modules[id(parameter)]

    return known


def _of_modules(modules: Modules) -> dict[str, torch.Tensor]:
    named = [
        (f"{prefix}{name}", each) for prefix, module in modules.items() for name, each in module.named_parameters()
    ]
    return dict(named)


def adopt(
    optimizer: torch.optim.Optimizer,
    outline: Outline,
    put: Callable[[Any, Any], Any],
    source: str,
    modules: Modules,
) -> None:
    """Give an optimizer these groups, options and state, in the lists and dicts that it has: schedulers share them.

    put: what becomes of the optimizer's own value (None where it has none) and that in the outline.
    source: whose outline it is, for messages.
    Raises: InputError, and changes nothing, where a parameter is missing, or of another shape.
    """
    found = matching(optimizer, outline, source, modules)
    if getattr(optimizer, "is_sharded", False):
        of_parameters = {name: put(None, value) for name, value in outline.of_parameters.items()}
        of_groups = [{key: put(None, value) for key, value in each.items()} for each in outline.options]
        others = {key: put(None, value) for key, value in outline.others.items()}
        outline = outline._replace(of_parameters=of_parameters, options=of_groups, others=others)
        optimizer.adopt(outline, found)  # type: ignore[attr-defined]
        return
    groups = optimizer.param_groups
    del groups[len(outline.names) :]
    groups.extend({"params": []} for _ in range(len(outline.names) - len(groups)))
    for group, names, options in zip(groups, outline.names, outline.options, strict=True):
        for key in set(group) - set(options) - {"params"}:
            del group[key]
        group["params"][:] = [found[name] for name in names]
        group.update({key: put(group.get(key), value) for key, value in options.items()})
    state = optimizer.state
    keyed = {**{found[name]: value for name, value in outline.of_parameters.items()}, **outline.others}
    values = {
        key: put(state[key], value) if key in state else _beside(key, put(None, value)) for key, value in keyed.items()
    }
    state.clear()
    state.update(values)
    follow(optimizer)


def follow(optimizer: torch.optim.Optimizer) -> None:
    """Reduce what an optimizer's groups have, which all ranks have been given now; nothing is communicated."""
    if (reducer := vars(optimizer).get("_reducer")) is not None:
        reducer.follow_told()
    elif (own := groups_of(optimizer)) is not None:
        own.take(own.change())


def matching(
    optimizer: torch.optim.Optimizer, outline: Outline, source: str, modules: Modules, is_strict: bool = False
) -> dict[str, torch.Tensor]:
    """The parameters of an outline's names.

    is_strict: the optimizer may have no parameter that the outline lacks.
    Raises: InputError where one is missing, or of another shape.
    """
    groups = groups_of(optimizer)
    own = _owned(optimizer, modules)
    known = {**_of_modules(modules), **(groups.known() if groups is not None else {}), **own}
    here = f"rank {rank()}'s optimizer" if is_initialized() else "this optimizer"
    lacking = {name: each for name, each in outline.shapes.items() if name not in known}
    if lacking:
        raise InputError(
            f"{here} has no parameter {_listed(lacking)}, which {source} has; add it to param_groups first, or pass "
            "all names: DistributedOptimizer(optimizer, model.named_parameters())"
        )
    others = {name: tuple(each.shape) for name, each in own.items() if name not in outline.shapes}
    if others and is_strict:
        raise InputError(f"{here} has {_listed(others)}, which {source} lacks; expected the same parameters")
    for name, shape in outline.shapes.items():
        if tuple(known[name].shape) != shape:
            raise InputError(
                f"{here}: parameter {name!r} has shape {tuple(known[name].shape)}, but {shape} in {source}; expected "
                "the same parameters"
            )
    return {name: known[name] for name in outline.shapes}


def _owned(optimizer: torch.optim.Optimizer, modules: Modules) -> dict[str, torch.Tensor]:
    """The parameters of an optimizer's groups, by name; those of which a ShardedOptimizer has pieces."""
    if getattr(optimizer, "is_sharded", False):
        wholes: dict[str, torch.Tensor] = optimizer.wholes()  # type: ignore[attr-defined]
        return wholes
    both = zip(_names(optimizer, modules), optimizer.param_groups, strict=True)
    return {name: each for names, group in both for name, each in zip(names, group["params"], strict=True)}


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    text: str = listed([f"{name!r} of shape {shape}" for name, shape in shapes.items()])
    return text


def _beside(parameter: Any, value: Any) -> Any:
    """The state of a parameter, on that one's GPU; what lies in host memory, such as Adam's step, stays there."""
    if not isinstance(parameter, torch.Tensor):
        return value
    device = parameter.device

    def moved(_: str, leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type else leaf

    return trees.map_leaves(value, moved)
