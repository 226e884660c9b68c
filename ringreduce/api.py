"""The functions on arrays: reduce, gather and broadcast what every rank passes.

Every rank must call the same functions in the same order. Before data moves the ranks compare what they were called
with; a difference raises MismatchError on every rank, and the job can go on.

Arrays may be NumPy, CuPy or torch, or anything that speaks DLPack or the CUDA array interface; results are of the same
kind and on the same device. They must be C-contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from ringreduce import fusion, runtime, trees
from ringreduce.agreement import Description, agree
from ringreduce.buffers import Buffer, as_buffer
from ringreduce.collectives import ring, tree
from ringreduce.errors import InputError
from ringreduce.ops import Average, ReduceOp, Reduction
from ringreduce.runtime import Runtime

Array = TypeVar("Array")


def allreduce(
    tensor: Array,
    *,
    name: str = "tensor",
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce `tensor` over all ranks; returns a new array, the same bits on every rank.

    Shape:  any, equal on all ranks; all types of `ringreduce.dtypes`. A number gives a NumPy number.
    op:     Average (bool: an error; integers: truncated toward zero), Sum, Min, Max (complex: errors), Product.
    Scale:  prescale_factor multiplies what goes in, postscale_factor what comes out.
    Cost:   2 (size - 1) messages a rank, about 2 nbytes (size - 1) / size sent by each; one small exchange before.
    Raises: InputError (a ValueError) for a wrong argument; MismatchError; PeerLostError.
    Source: Horovod's allreduce; the ring of Patarasuk & Yuan, 2009.

    >>> allreduce(np.float32(rank()))                                                                  # doctest: +SKIP
    np.float32(1.5)
    """
    return grouped_allreduce(
        [tensor], names=[name], op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor
    )[0]


def allreduce_(
    tensor: Array,
    *,
    name: str = "tensor",
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce `tensor` over all ranks in place, and return it; otherwise as `allreduce`."""
    grouped_allreduce_(
        [tensor], names=[name], op=op, prescale_factor=prescale_factor, postscale_factor=postscale_factor
    )
    return tensor


def grouped_allreduce(
    tensors: Sequence[Array],
    *,
    names: Sequence[str] | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Reduce many tensors with few messages; returns new arrays. Otherwise as `allreduce`.

    Cost: tensors smaller than `fusion_slot_bytes` travel together; one small exchange before for all.
    """
    inputs = [as_buffer(tensor) for tensor in tensors]
    outputs = [each.empty(each.shape) for each in inputs]
    _allreduce(inputs, outputs, names, op, prescale_factor, postscale_factor)
    return [_like(tensor, output) for tensor, output in zip(tensors, outputs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Array],
    *,
    names: Sequence[str] | None = None,
    op: ReduceOp = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Reduce many tensors in place, and return them; otherwise as `grouped_allreduce`."""
    inputs = [as_buffer(tensor, writable=True) for tensor in tensors]
    _allreduce(inputs, inputs, names, op, prescale_factor, postscale_factor)
    return list(tensors)


def _allreduce(
    inputs: Sequence[Buffer],
    outputs: Sequence[Buffer],
    names: Sequence[str] | None,
    op: ReduceOp,
    prescale: float,
    postscale: float,
) -> None:
    current = runtime.current("allreduce")
    if not isinstance(op, ReduceOp):
        raise InputError(f"allreduce: op={op!r}; expected Average, Sum, Min, Max or Product of ringreduce")
    details = (("op", repr(op)), ("prescale_factor", repr(prescale)), ("postscale_factor", repr(postscale)))
    for each in inputs:
        Reduction(op, each.element, current.world.size, prescale, postscale).check()
    agree(current.transport, _describe("allreduce", inputs, names, details))
    for slot in fusion.plan(inputs, current.settings.fusion_slot_bytes):
        reduction = Reduction(op, slot.element, current.world.size, prescale, postscale)
        packed = fusion.pack(slot, inputs, outputs)
        ring.allreduce(packed, current.transport, reduction, current.settings.ring_segment_bytes)
        fusion.unpack(slot, packed, outputs)


def allgather(tensor: Array, *, name: str = "tensor") -> Array:
    """The tensors of all ranks, one after the other along dim 0, in the order of the ranks.

    Shape:  at least 1-d; dim 0 may differ per rank (and be 0), the others must be equal.
    Cost:   size - 1 messages a rank; all rows but those of one rank sent by each.
    Raises: InputError for a 0-d tensor; MismatchError; PeerLostError.
    Source: Horovod's allgather.
    """
    current = runtime.current("allgather")
    mine = as_buffer(tensor)
    if not mine.shape:
        raise InputError(f"allgather {name!r}: a 0-d tensor has no rows to gather; pass one of at least 1 dimension")
    row_shape = mine.shape[1:]
    description = Description("allgather", name, mine.element.name, row_shape, _device_kind(mine))
    rows = agree(current.transport, [description], mine.shape[0])
    row_count = int(np.prod(row_shape, dtype=np.int64))
    gathered = mine.empty((sum(rows), *row_shape))
    counts = [each * row_count for each in rows]
    start = sum(counts[: current.world.rank])
    gathered.flat[start : start + mine.count] = mine.flat
    ring.allgather(gathered.flat, current.transport, counts, current.world.rank, current.settings.ring_segment_bytes)
    return _like(tensor, gathered)


def broadcast(tensor: Array, root_rank: int, *, name: str = "tensor") -> Array:
    """The root's tensor, as a new array on every rank.

    Shape:  any, equal on all ranks.
    Cost:   at most log2(size) messages sent by a rank, each of the whole tensor.
    Raises: InputError for a root_rank that is no rank; MismatchError, for differing roots too; PeerLostError.
    Source: Horovod's broadcast.
    """
    output = as_buffer(tensor).copy()
    _broadcast([output], root_rank, [name], "broadcast")
    return _like(tensor, output)


def broadcast_(tensor: Array, root_rank: int, *, name: str = "tensor") -> Array:
    """Overwrite `tensor` with the root's, and return it; otherwise as `broadcast`."""
    _broadcast([as_buffer(tensor, writable=True)], root_rank, [name], "broadcast")
    return tensor


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Overwrite parameters with the root's, so that all ranks start alike.

    params: a dict (nested too, such as a torch state_dict), (name, tensor) pairs (such as named_parameters()), or a
            list of tensors; all of them arrays that can be written to.
    Cost:   as `broadcast`; tensors smaller than `fusion_slot_bytes` travel together.
    Raises: InputError (a ValueError) for anything else; MismatchError; PeerLostError.
    Source: Horovod's broadcast_parameters.
    """
    named = _named_parameters(params)
    outputs = [as_buffer(tensor, writable=True) for _, tensor in named]
    _broadcast(outputs, root_rank, [name for name, _ in named], "broadcast_parameters")


def _named_parameters(params: Any) -> list[tuple[str, Any]]:
    if not isinstance(params, dict | list) and hasattr(params, "__next__"):
        params = list(params)  # model.named_parameters() is a generator
    if not isinstance(params, dict | list | tuple):
        raise InputError(
            f"broadcast_parameters: a {type(params).__name__}; expected a dict of tensors, or a list of (name, tensor) "
            "pairs"
        )
    if not isinstance(params, dict) and all(_is_pair(each) for each in params):
        names = [name for name, _ in params]
        if len(set(names)) < len(names):
            raise InputError(f"broadcast_parameters: names must differ; expected each once, got {', '.join(names)}")
        params = dict(params)
    return trees.named_leaves(params)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def _broadcast(outputs: Sequence[Buffer], root_rank: int, names: Sequence[str], function: str) -> None:
    current = runtime.current(function)
    agree(current.transport, _describe(function, outputs, names, (("root_rank", repr(root_rank)),)))
    _check_root(function, root_rank, current)
    for slot in fusion.plan(outputs, current.settings.fusion_slot_bytes):
        packed = fusion.pack(slot, outputs, outputs)
        tree.broadcast(packed, current.transport, root_rank)
        fusion.unpack(slot, packed, outputs)


def _check_root(function: str, root_rank: int, current: Runtime) -> None:
    if not isinstance(root_rank, int | np.integer) or not 0 <= root_rank < current.world.size:
        raise InputError(f"{function}: root_rank={root_rank!r}; expected a rank from 0 to {current.world.size - 1}")


def barrier() -> None:
    """Return when every rank has called it.

    Cost:   log2(size) small messages a rank, rounded up.
    Raises: PeerLostError.
    """
    current = runtime.current("barrier")
    agree(current.transport, [Description("barrier", "barrier")])


def broadcast_object(obj: Any, root_rank: int = 0, *, name: str = "object") -> Any:
    """The root's object on every rank, pickled (lambdas and classes of the script too) unless it is the root.

    Raises: InputError for a root_rank that is no rank; MismatchError; PeerLostError. Only the root's `obj` is used.
    Source: Horovod's broadcast_object.
    """
    current = runtime.current("broadcast_object")
    is_root = root_rank == current.world.rank
    pickled = np.frombuffer(cloudpickle.dumps(obj), np.uint8) if is_root else np.empty(0, np.uint8)
    description = Description("broadcast_object", name, details=(("root_rank", repr(root_rank)),))
    lengths = agree(current.transport, [description], pickled.size)
    _check_root("broadcast_object", root_rank, current)
    if not is_root:
        pickled = np.empty(lengths[root_rank], np.uint8)
    tree.broadcast(pickled, current.transport, root_rank)
    return obj if is_root else cloudpickle.loads(pickled.data)


def allgather_object(obj: Any, *, name: str = "object") -> list[Any]:
    """Every rank's object, pickled, in the order of the ranks.

    Raises: MismatchError; PeerLostError.
    Source: Horovod's allgather_object.
    """
    current = runtime.current("allgather_object")
    pickled = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = agree(current.transport, [Description("allgather_object", name)], pickled.size)
    ends = np.cumsum(lengths)
    gathered = np.empty(int(ends[-1]), np.uint8)
    rank = current.world.rank
    gathered[ends[rank] - lengths[rank] : ends[rank]] = pickled
    ring.allgather(gathered, current.transport, lengths, rank, current.settings.ring_segment_bytes)
    return [cloudpickle.loads(gathered[end - n : end].data) for end, n in zip(ends, lengths, strict=True)]


def _describe(
    operation: str, tensors: Sequence[Buffer], names: Sequence[str] | None, details: tuple[tuple[str, str], ...]
) -> list[Description]:
    if names is None:
        names = [f"tensor.{k}" for k in range(len(tensors))]
    if len(names) != len(tensors):
        raise InputError(f"{operation}: {len(names)} names for {len(tensors)} tensors; pass one name for each")
    return [
        Description(operation, name, each.element.name, each.shape, _device_kind(each), details)
        for name, each in zip(names, tensors, strict=True)
    ]


def _device_kind(tensor: Buffer) -> str:
    return tensor.device.partition(":")[0]  # cuda:0 here and cuda:1 there is how it is meant


def _like(original: Array, result: Buffer) -> Array:
    """The result as the caller's kind of array; a NumPy number where a number was passed."""
    array = result.array()
    return array[()] if isinstance(original, bool | int | float | complex | np.generic) else array  # type: ignore[no-any-return]


def rank() -> int:
    """This process's number, 0 to size() - 1; raises NotInitializedError before init()."""
    return runtime.current("rank").world.rank


def size() -> int:
    """The number of ranks; raises NotInitializedError before init()."""
    return runtime.current("size").world.size


def local_rank() -> int:
    """This rank's number on its host: the GPU to use; raises NotInitializedError before init()."""
    return runtime.current("local_rank").world.local_rank


def local_size() -> int:
    """The number of ranks on this host; raises NotInitializedError before init()."""
    return runtime.current("local_size").world.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have this local rank; raises NotInitializedError before init()."""
    return runtime.current("cross_rank").world.cross_rank


def cross_size() -> int:
    """The number of hosts that have this local rank; raises NotInitializedError before init()."""
    return runtime.current("cross_size").world.cross_size


def is_homogeneous() -> bool:
    """True when every host has equally many ranks; raises NotInitializedError before init()."""
    return runtime.current("is_homogeneous").world.is_homogeneous
