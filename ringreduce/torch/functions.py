"""broadcast_optimizer_state: all ranks' optimizers get the root's state, whatever each had before.

The root sends an outline of its state, pickled, with a mark in place of each tensor; then the tensors, as one group.
No rank takes a step for this, so the root's own state does not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ringreduce import trees
from ringreduce.api.broadcast import submit_broadcast
from ringreduce.api.objects import broadcast_object
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.world import rank
from ringreduce.arrays.view import as_buffer
from ringreduce.errors import InputError

NAME = "optimizer state"  # of the operations, so that they match on ranks with different numbers of unnamed operations


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks' optimizers the root's state and options; afterwards all `state_dict()`s are equal, bit for bit.

    optimizer: a torch optimizer, or one that `DistributedOptimizer` or `ShardedOptimizer` wrapped, with the same
               parameters on each rank. The root may have state that others lack, or lack state that they have.
    model:     ignored; there for Horovod's scripts.
    Cost:      a broadcast of the outline, and one of all tensors.
    Raises:    InputError (a ValueError) on a rank whose optimizer has other parameters than the root's; PeerLostError.
    Source:    Horovod's broadcast_optimizer_state, which takes a step where there is no state, and refuses LBFGS.
    """
    is_root = rank() == root_rank
    if getattr(optimizer, "is_sharded", False):
        whole = optimizer.state_dict()
        optimizer.load_state_dict(broadcast_object(whole if is_root else None, root_rank, NAME, process_set))
        return
    sent: list[torch.Tensor] = []
    outline, marks = broadcast_object(_outline(optimizer, sent) if is_root else None, root_rank, NAME, process_set)
    # as bytes, whatever type they are of: no arithmetic is done on them
    received = [each.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for each in sent]
    if not is_root:
        received = [mark.room(optimizer) for mark in marks]
    buffers = [as_buffer(each) for each in received]
    names = [mark.name for mark in marks]
    submit_broadcast(buffers, buffers, root_rank, NAME, names, process_set, lambda _: None, waits=True).wait()
    if is_root:
        return
    tensors = [mark.restored(each) for mark, each in zip(marks, received, strict=True)]

    def filled(_: Any, value: Any) -> Any:
        return trees.map_leaves(value, lambda _, leaf: tensors[leaf.number] if isinstance(leaf, _Mark) else leaf)

    adopt(optimizer, outline, filled)


class Parts(NamedTuple):
    """An optimizer's options and state, with numbers for parameters."""

    sizes: list[int]  # how many parameters each group has
    options: list[dict[str, Any]]  # of each group, all but its parameters
    of_parameters: dict[int, Any]
    others: dict[Any, Any]  # state that belongs to no parameter, by its key


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Stands for a tensor, which is sent separately."""

    number: int
    name: str
    owner: int  # the number of the parameter on whose device it lies, unless it lies on the host
    on_host: bool
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def room(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Memory to receive its bytes in."""
        parameters = _parameters(optimizer)
        device = "cpu" if self.on_host or self.owner >= len(parameters) else parameters[self.owner].device
        return torch.empty(self.shape.numel() * self.dtype.itemsize, dtype=torch.uint8, device=device)

    def restored(self, received: torch.Tensor) -> torch.Tensor:
        """The tensor, in the memory layout that it has on the root."""
        tensor = received.view(self.dtype).view(self.shape)
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)


def _outline(optimizer: torch.optim.Optimizer, sent: list[torch.Tensor]) -> tuple[Parts, list[_Mark]]:
    """What this optimizer's state looks like, with marks for tensors; these are appended to `sent`."""
    marks: list[_Mark] = []

    def mark(leaf: Any, name: str, owner: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        number, on_host = len(sent), leaf.device.type == "cpu"
        marks.append(_Mark(number, name, owner, on_host, leaf.shape, leaf.stride(), leaf.dtype))
        sent.append(leaf.detach())
        return marks[-1]

    def marked(value: Any, name: str, owner: int) -> Any:
        return trees.map_leaves(value, lambda path, leaf: mark(leaf, path, owner), name)

    parts = taken_apart(optimizer)
    firsts = [sum(parts.sizes[:index]) for index in range(len(parts.sizes))]
    return Parts(
        parts.sizes,
        [marked(own, f"group {index}", firsts[index]) for index, own in enumerate(parts.options)],
        {number: marked(value, f"parameter {number}", number) for number, value in parts.of_parameters.items()},
        {key: marked(value, f"state {key}", 0) for key, value in parts.others.items()},
    ), marks


def taken_apart(optimizer: torch.optim.Optimizer) -> Parts:
    """Its options and state; nothing is copied."""
    numbers = {id(parameter): number for number, parameter in enumerate(_parameters(optimizer))}
    of_parameters, others = {}, {}
    for key, value in optimizer.state.items():
        number = numbers.get(id(key))
        if number is None:
            others[key] = value
        else:
            of_parameters[number] = value
    groups = optimizer.param_groups
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return Parts([len(group["params"]) for group in groups], options, of_parameters, others)


def adopt(optimizer: torch.optim.Optimizer, parts: Parts, put: Callable[[Any, Any], Any]) -> None:
    """Give an optimizer these options and state. Changes the dicts that it has: schedulers and wrappers share them.

    put: what becomes of the optimizer's own value (None where it has none) and that in `parts`.
    """
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != parts.sizes:
        raise InputError(
            f"this rank's optimizer has groups of {sizes} parameters, the root's of {parts.sizes}; all ranks must have "
            "the same parameters"
        )
    for group, options in zip(optimizer.param_groups, parts.options, strict=True):
        for key in set(group) - set(options) - {"params"}:
            del group[key]
        group.update({key: put(group.get(key), value) for key, value in options.items()})
    parameters, state = _parameters(optimizer), optimizer.state
    keyed = {**{parameters[number]: value for number, value in parts.of_parameters.items()}, **parts.others}
    values = {
        key: put(state[key], value) if key in state else _beside(key, put(None, value)) for key, value in keyed.items()
    }
    state.clear()
    state.update(values)


def _beside(parameter: Any, value: Any) -> Any:
    """The state of a parameter, on that one's GPU; what lies in host memory, such as Adam's step, stays there."""
    if not isinstance(parameter, torch.Tensor):
        return value
    device = parameter.device

    def moved(_: str, leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, torch.Tensor) and leaf.device.type == device.type else leaf

    return trees.map_leaves(value, moved)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
