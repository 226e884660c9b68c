"""broadcast_optimizer_state: all ranks' optimizers get the root's state, whatever each had before.

The root sends an outline of its state, pickled, with a mark in place of each tensor; then the tensors, as one group.
No rank takes a step for this, so the root's own state does not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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

    optimizer: a torch optimizer, or one that `DistributedOptimizer` wrapped, with the same parameters on each rank. The
               root may have state that others lack, or lack state that they have.
    model:     ignored; there for Horovod's scripts.
    Cost:      a broadcast of the outline, and one of all tensors.
    Raises:    InputError (a ValueError) on a rank whose optimizer has other parameters than the root's; PeerLostError.
    Source:    Horovod's broadcast_optimizer_state, which takes a step where there is no state, and refuses LBFGS.
    """
    is_root = rank() == root_rank
    sent: list[torch.Tensor] = []
    outline, marks = broadcast_object(_outline(optimizer, sent) if is_root else None, root_rank, NAME, process_set)
    # as bytes, whatever type they are of: no arithmetic is done on them
    received = [each.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for each in sent]
    if not is_root:
        received = [mark.room(optimizer) for mark in marks]
    buffers = [as_buffer(each) for each in received]
    names = [mark.name for mark in marks]
    submit_broadcast(buffers, buffers, root_rank, NAME, names, process_set, lambda _: None, waits=True).wait()
    if not is_root:
        _adopt(optimizer, outline, [mark.restored(each) for mark, each in zip(marks, received, strict=True)])


class _Outline(NamedTuple):
    """An optimizer's options and state with marks for tensors, and numbers for parameters."""

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


def _outline(optimizer: torch.optim.Optimizer, sent: list[torch.Tensor]) -> tuple[_Outline, list[_Mark]]:
    """What this optimizer's state looks like; its tensors are appended to `sent`."""
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

    sizes: list[int] = []
    options = []
    for index, group in enumerate(optimizer.param_groups):
        own = {key: value for key, value in group.items() if key != "params"}
        options.append(marked(own, f"group {index}", sum(sizes)))
        sizes.append(len(group["params"]))
    numbers = {id(parameter): number for number, parameter in enumerate(_parameters(optimizer))}
    of_parameters, others = {}, {}
    for key, value in optimizer.state.items():
        number = numbers.get(id(key))
        if number is None:
            others[key] = marked(value, f"state {key}", 0)
        else:
            of_parameters[number] = marked(value, f"parameter {number}", number)
    return _Outline(sizes, options, of_parameters, others), marks


def _adopt(optimizer: torch.optim.Optimizer, outline: _Outline, tensors: Sequence[torch.Tensor]) -> None:
    """Make the root's state this optimizer's. Changes the dicts that it has: schedulers and wrappers share them."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != outline.sizes:
        raise InputError(
            f"broadcast_optimizer_state: this rank's optimizer has groups of {sizes} parameters, the root's of "
            f"{outline.sizes}; all ranks must have the same parameters"
        )

    def filled(value: Any) -> Any:
        return trees.map_leaves(value, lambda _, leaf: tensors[leaf.number] if isinstance(leaf, _Mark) else leaf)

    for group, options in zip(optimizer.param_groups, outline.options, strict=True):
        for key in set(group) - set(options) - {"params"}:
            del group[key]
        group.update(filled(options))
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    optimizer.state.update({parameters[number]: filled(value) for number, value in outline.of_parameters.items()})
    optimizer.state.update(filled(outline.others))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
