"""What all ranks should have alike: an optimizer's parameters, and the other tensors of the model that they are in."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ringreduce.checks.blame import BUFFER, OWNED, TRAINS
from ringreduce.checks.divergence import Part


class Parts:
    """Those of one optimizer."""

    def __init__(self) -> None:
        self._model: Callable[[], torch.nn.Module | None] = lambda: None
        self._count = 0  # of the parameters for which it was found

    def of(self, names: Mapping[torch.Tensor, str]) -> list[Part]:
        """The optimizer's parameters, which are called so; then the other parameters of its model, and buffers.

        Cost: GPU tensors are copied; the first time a model is looked for among all objects of the process.
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
        return [
            Part(name, _bytes_of(each), flags | (TRAINS if each.requires_grad else 0))
            for name, each, flags in named
            if each.layout == torch.strided and not each.is_meta
        ]


def _model_of(owned: Mapping[int, Any]) -> torch.nn.Module | None:
    """The smallest module that has most of the parameters: no optimizer knows its model."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    sizes = [(_count_in(module, owned), module) for module in modules]
    most = max((count for count, _ in sizes), default=0)
    best = [module for count, module in sizes if count == most > 0]
    return min(best, key=lambda each: sum(1 for _ in each.modules()), default=None)


def _count_in(module: torch.nn.Module, owned: Mapping[int, Any]) -> int:
    try:
        return sum(id(each) in owned for each in module.parameters())
    except (AttributeError, RuntimeError):  # another thread is building this one: it is not the optimizer's
        return 0


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
