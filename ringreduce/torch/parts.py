"""What all ranks should have alike: an optimizer's parameters, and the other tensors of the model that they are in."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ringreduce.arrays import trees
from ringreduce.checks.blame import BUFFER, OWNED, TRAINS
from ringreduce.checks.divergence import Part, parts_of

MOST_LOOKS = 8  # through all objects of the process


class Parts:
    """Those of one optimizer."""

    def __init__(self) -> None:
        self._model: Callable[[], torch.nn.Module | None] = lambda: None
        self._count = 0  # of the parameters for which it was found

    def of(self, names: Mapping[torch.Tensor, str], groups: Sequence[Mapping[str, Any]]) -> list[Part]:
        """The optimizer's parameters, which are called so, and options; then what else its model has.

        Cost: GPU tensors are copied; the first time a few looks through all objects of the process, to find the model.
        """
        owned = {id(parameter): (name, parameter) for parameter, name in names.items()}
        model = self._model()
        if self._count != len(owned):
            self._count, model = len(owned), _model_of(owned)
            self._model = weakref.ref(model) if model is not None else self._model
        named = [(name, each, OWNED) for name, each in owned.values()]
        for name, each in [*model.named_parameters(), *model.named_buffers()] if model is not None else ():
            if id(each) not in owned:
                named.append((name, each, 0 if isinstance(each, torch.nn.Parameter) else BUFFER))
        return _options(groups) + [
            Part(name, functools.partial(_bytes_of, each), flags | (TRAINS if each.requires_grad else 0))
            for name, each, flags in named
            if not each.is_meta
        ]


def _options(groups: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Such as lr, and "lr of group 1"."""
    found = []
    for number, group in enumerate(groups):
        for name, value in trees.leaves({key: each for key, each in group.items() if key != "params"}):
            called = f"{name} of group {number}" if number else name
            is_tensor = isinstance(value, torch.Tensor) and not value.dim()  # as a learning rate may be
            found += [Part(called, value.item)] if is_tensor else parts_of({called: value})
    return found


def _model_of(owned: Mapping[int, tuple[str, torch.Tensor]]) -> torch.nn.Module | None:
    """The smallest module that has most of the parameters: no optimizer knows its model.

    It is looked for upwards, from the first parameter that is in a module, but not from more than MOST_LOOKS, as an
    optimizer may have thousands that are in none. Not among `gc.get_objects()`: Python cannot finish a tuple that
    another thread is just making while a list of all objects has it.
    """
    above: list[torch.nn.Module] = []
    for _, parameter in itertools.islice(owned.values(), MOST_LOOKS):
        if above := _above(parameter):
            break
    sizes = [(sum(id(each) in owned for each in module.parameters()), module) for module in above]
    most = max((count for count, _ in sizes), default=0)
    best = [module for count, module in sizes if count == most]
    return min(best, key=lambda each: sum(1 for _ in each.modules()), default=None)


def _above(parameter: torch.Tensor) -> list[torch.nn.Module]:
    """The modules that have it, those that have these, and so on."""
    found: dict[int, torch.nn.Module] = {}
    level: list[Any] = [parameter]
    while level:
        level = [each for each in _holders(level) if id(each) not in found]
        found |= {id(each): each for each in level}
    return list(found.values())


def _holders(things: Sequence[Any]) -> list[torch.nn.Module]:
    """The modules of which one of these is a parameter or a module, by way of the dicts that modules keep them in."""
    dicts = [each for each in gc.get_referrers(*things) if isinstance(each, dict)]
    referrers = gc.get_referrers(*dicts) if dicts else []
    # a module's attributes are in a dict, too, or, where nobody has asked for that, in the module itself
    attributes = [each for each in referrers if type(each) is dict]
    referrers += gc.get_referrers(*attributes) if attributes else []
    wanted = set(map(id, things))
    modules = {id(each): each for each in referrers if issubclass(type(each), torch.nn.Module)}
    return [each for each in modules.values() if wanted.intersection(map(id, _held_by(each)))]


def _held_by(module: torch.nn.Module) -> list[Any]:
    attributes = vars(module)  # one that another thread is building has not got all
    return [each for name in ("_parameters", "_modules") for each in attributes.get(name, {}).values()]


def _bytes_of(tensor: torch.Tensor) -> Any:
    host = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return host.reshape(-1).view(torch.uint8).numpy()
