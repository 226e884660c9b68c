"""broadcast and broadcast_parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.arrays import trees
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.view import as_buffers, to_write
from ringreduce.errors import InputError
from ringreduce.execution.submission import Handle
from ringreduce.runtime.submit import Array, like, prepared, refused, whole

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_parameters"]


def broadcast(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """The root's tensor, as a new array on every rank.

    Shape:  any, equal on all ranks.
    root_rank: a rank of the world, in a process set too.
    name:   as in `allreduce`.
    Cost:   a rank sends at most log2(size) messages, each of the whole tensor; one agreement.
    Raises: InputError on every rank for a root_rank that does not exist; MismatchError, for differing roots too;
            PeerLostError.
    Source: Horovod's broadcast.
    """
    own = {"root_rank": root_rank}, process_set, _broadcast_one
    return runtime.at_once("broadcast", name, tensor, None, *own, in_place=False)  # type: ignore[no-any-return]


def broadcast_async(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Array]:
    """Begin a `broadcast`; `synchronize(handle)` returns its result."""
    return _broadcast_one(tensor, root_rank, name, process_set, in_place=False, waits=False)


def broadcast_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Overwrite `tensor` with the root's, and return it; otherwise as `broadcast`."""
    own = {"root_rank": root_rank}, process_set, _broadcast_one
    return runtime.at_once("broadcast", name, tensor, tensor, *own, in_place=True)  # type: ignore[no-any-return]


def broadcast_async_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    waits: bool = False,
) -> Handle[Array]:
    """Begin a `broadcast_`; `tensor` must not be used until `synchronize(handle)` returns it.

    waits: the caller does so at once.
    """
    return _broadcast_one(tensor, root_rank, name, process_set, in_place=True, waits=waits)


def _broadcast_one(
    tensor: Array, root_rank: int, name: str | None, process_set: ProcessSet, *, in_place: bool, waits: bool
) -> Handle[Array]:
    number = number_of(process_set, "broadcast")
    try:
        if in_place:
            targets, written = to_write([tensor])
            handle = submit_broadcast(targets, targets, root_rank, name, None, process_set, waits)
            return handle.mapped(lambda _: written() or tensor)
        (source,) = as_buffers([tensor])
        target = source.empty(source.shape)
        handle = submit_broadcast([source], [target], root_rank, name, None, process_set, waits)
        return handle.mapped(lambda _: like(tensor, target))
    except InputError as exc:
        raise refused("broadcast", exc, number, name) from exc.__cause__


def submit_broadcast(
    inputs: Sequence[Buffer],
    outputs: Sequence[Buffer],
    root_rank: int,
    name: str | None,
    names: Sequence[str] | None,
    process_set: ProcessSet,
    waits: bool,
) -> Handle:
    """Submit a broadcast of one tensor, or of a group with `names`."""
    return runtime.current("broadcast").engine.submit(
        "broadcast",
        name,
        number_of(process_set, "broadcast"),
        details=(("root_rank", whole(root_rank)),),
        names=None if names is None else tuple(names),
        inputs=inputs,
        outputs=outputs,
        waits=waits,
    )


def broadcast_parameters(params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite parameters with the root's, so that all ranks start with the same values.

    params: a dict (nested too, such as a torch state_dict), (name, tensor) pairs (such as named_parameters()), or a
            list of tensors; all of them writable arrays, of any memory layout.
    Cost:   as `broadcast`; small tensors are fused.
    Raises: InputError (a ValueError) for anything else, with the name of what it is; MismatchError, also where another
            rank has something else; PeerLostError.
    Source: Horovod's broadcast_parameters.
    """
    number = number_of(process_set, "broadcast_parameters")
    names, outputs, written = prepared("broadcast_parameters", None, number, lambda: _outputs(params))
    submit_broadcast(outputs, outputs, root_rank, None, names, process_set, waits=True).wait()
    written()


def _outputs(params: Any) -> tuple[list[str], list[Buffer], Callable[[], Any]]:
    """The names of parameters, where their values go, and what is called when they are there."""
    named = _named_parameters(params)
    names = [name for name, _ in named]
    try:
        return names, *to_write([each for _, each in named])
    except InputError as exc:
        raise refused("broadcast_parameters", exc, None, None, names, len(names)) from exc.__cause__


def _named_parameters(params: Any) -> list[tuple[str, Any]]:
    if not isinstance(params, dict | list) and hasattr(params, "__next__"):
        params = list(params)  # model.named_parameters() is a generator
    if not isinstance(params, dict | list | tuple):
        raise InputError(
            f"broadcast_parameters: got a {type(params).__name__}; expected a dict of tensors, or a list of "
            "(name, tensor) pairs"
        )
    if not isinstance(params, dict) and all(
        isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in params
    ):
        names = [name for name, _ in params]
        if len(set(names)) < len(names):
            raise InputError(f"broadcast_parameters: names must differ; expected each once, got {', '.join(names)}")
        params = dict(params)
    return trees.named_leaves(params)
