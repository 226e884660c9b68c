"""The other forms that a method of torch's groups has: one tensor in place of a list, values in place of options.

group.allreduce(tensor, op=dist.ReduceOp.MAX)        as group.allreduce([tensor], options)
group.allgather(tensors, tensor, timeout=timeout)    as group.allgather([tensors], [tensor], options)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}  # of torch's options
VALUES = {
    "allreduce": ("op", "timeout"),
    "broadcast": ("root", "timeout"),
    "reduce": ("root", "op", "timeout"),
    "gather": ("root", "timeout"),
    "scatter": ("root", "timeout"),
    "reduce_scatter": ("op", "timeout"),
}
"""By method, in their order; the other methods that have options take a timeout."""
LISTS = {*VALUES, "allgather"}  # the methods in which one tensor stands for a list of it


def of_any_form(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, which takes lists and options, for all forms of its arguments."""
    name, parameters = method.__name__, list(inspect.signature(method).parameters)[1:]
    if "opts" not in parameters:
        return method
    count, order = parameters.index("opts"), VALUES.get(name, ("timeout",))

    @functools.wraps(method)
    def run(group: Any, *args: Any, **more: Any) -> Any:
        tensors, rest = args[:count], args[count:]
        if not (rest and hasattr(rest[0], "timeout")):  # else they are options, as torch itself passes them
            values = dict(zip(order, rest, strict=False)) | {each: more.pop(each) for each in FIELDS if each in more}
            rest = (SimpleNamespace(**{FIELDS[each]: value for each, value in values.items()}),) if values else ()
            if name in LISTS and any(isinstance(each, torch.Tensor) for each in tensors):
                tensors = tuple([[each] for each in tensors])
        return method(group, *tensors, *rest, **more)

    return run
