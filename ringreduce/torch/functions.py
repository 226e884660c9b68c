"""broadcast_optimizer_state: all ranks' optimizers get the root's state, whatever each had before.

The root sends an outline of its state, pickled, with a mark in place of each tensor; then the tensors, as one group.
No rank takes a step for this, so the root's own state does not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ringreduce.api.broadcast import submit_broadcast
from ringreduce.api.objects import allgather_object, broadcast_made
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.api.world import rank
from ringreduce.arrays import trees
from ringreduce.arrays.view import as_buffer
from ringreduce.errors import InputError
from ringreduce.runtime.submit import prepared
from ringreduce.torch.outline import Modules, Outline, adopt, follow, matching, outline_of

NAME = "optimizer state"  # of the operations, so that they match on ranks with different numbers of unnamed operations


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give all ranks' optimizers the root's state and options; afterwards all `state_dict()`s are equal, bit for bit.

    Parameters are matched by name, and where none is known by their places in the groups; a rank whose groups have the
    same parameters in another order gets the root's groups.

    optimizer: a torch optimizer, or one that `DistributedOptimizer` or `ShardedOptimizer` wrapped, with the same
               parameters on each rank. The root may have state that others lack, or lack state that they have.
    model:     the names of parameters that an optimizer itself does not know.
    Cost:      a broadcast of the outline, an agreement, and a broadcast of all tensors.
    Raises:    InputError (a ValueError) on all ranks where the optimizer of one has other parameters than the root's;
               MismatchError on all ranks where the state of one cannot be sent, or received; PeerLostError.
    Source:    Horovod's broadcast_optimizer_state, which takes a step where there is no state, and refuses LBFGS.
    """
    modules = {} if model is None else {"": model}
    is_root = rank() == root_rank
    sent: list[torch.Tensor] = []
    own = outline_of(optimizer, modules)

    def made() -> tuple[Outline, list[_Mark]]:
        marked, marks = _marked(own, sent)
        # as bytes, whatever type they are of: no arithmetic is done on them
        sent[:] = [each.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for each in sent]
        return marked, marks

    outline, marks = broadcast_made(made, root_rank, NAME, process_set)
    names, source = tuple(mark.name for mark in marks), f"rank {root_rank}'s optimizer"
    why_not = "" if is_root else _why_not(optimizer, outline, source, modules)
    if whys := list(filter(None, allgather_object(why_not, f"{NAME}, its parameters", process_set))):
        raise InputError(whys[0])
    room = lambda: sent if is_root else [mark.room(own.parameters) for mark in marks]  # noqa: E731
    moved = prepared("broadcast", NAME, number_of(process_set, "broadcast"), room)
    buffers = [as_buffer(each) for each in moved]
    submit_broadcast(buffers, buffers, root_rank, NAME, names, process_set, waits=True).wait()
    if is_root and not getattr(optimizer, "is_sharded", False):
        follow(optimizer)
        return
    tensors = [mark.restored(each) for mark, each in zip(marks, moved, strict=True)]

    def filled(_: Any, value: Any) -> Any:
        return trees.map_leaves(value, lambda _, leaf: tensors[leaf.number] if isinstance(leaf, _Mark) else leaf)

    adopt(optimizer, outline, filled, source, modules)


def _why_not(optimizer: torch.optim.Optimizer, outline: Outline, source: str, modules: Modules) -> str:
    try:
        matching(optimizer, outline, source, modules, is_strict=True)
    except InputError as error:
        return str(error)
    return ""


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Stands for a tensor, which is sent separately."""

    number: int
    name: str
    owner: str  # the parameter on whose device it lies, unless it lies on the host
    on_host: bool
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def room(self, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Memory to receive its bytes in."""
        device = "cpu" if self.on_host or self.owner not in parameters else parameters[self.owner].device
        return torch.empty(self.shape.numel() * self.dtype.itemsize, dtype=torch.uint8, device=device)

    def restored(self, received: torch.Tensor) -> torch.Tensor:
        """The tensor, in the memory layout that it has on the root."""
        tensor = received.view(self.dtype).view(self.shape)
        if tensor.stride() == self.stride:
            return tensor
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=tensor.device).copy_(tensor)


def _marked(outline: Outline, sent: list[torch.Tensor]) -> tuple[Outline, list[_Mark]]:
    """The outline with marks for tensors; these are appended to `sent`."""
    marks: list[_Mark] = []

    def mark(leaf: Any, name: str, owner: str) -> Any:
        if not _is_plain(leaf):
            return leaf
        number, on_host = len(sent), leaf.device.type == "cpu"
        stride = torch.empty_like(leaf, device="meta").stride()  # its own, unless it has gaps, or shares elements
        marks.append(_Mark(number, name, owner, on_host, leaf.shape, stride, leaf.dtype))
        sent.append(leaf.detach())
        return marks[-1]

    def marked(value: Any, name: str, owner: str) -> Any:
        return trees.map_leaves(value, lambda path, leaf: mark(leaf, path, owner), name)

    firsts = [names[0] if names else "" for names in outline.names]
    both = enumerate(zip(outline.options, firsts, strict=True))
    return outline._replace(
        options=[marked(options, f"group {number}", first) for number, (options, first) in both],
        of_parameters={name: marked(value, name, name) for name, value in outline.of_parameters.items()},
        others={key: marked(value, f"state {key}", next(iter(firsts), "")) for key, value in outline.others.items()},
        parameters={},
    ), marks


def _is_plain(leaf: Any) -> bool:
    """True for a tensor whose elements can be sent as bytes; others are pickled."""
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return False
    return not (leaf.is_quantized or leaf.is_nested) and leaf.device.type in ("cpu", "cuda")
