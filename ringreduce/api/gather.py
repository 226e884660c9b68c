"""allgather and alltoall, in all their forms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of, placed
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import element_type
from ringreduce.arrays.gpu_buffer import GpuBuffer, uploaded
from ringreduce.arrays.torch_tensor import is_torch
from ringreduce.arrays.view import as_buffer, as_buffers
from ringreduce.errors import InputError, UnsupportedArrayError
from ringreduce.execution.submission import Handle, Submission
from ringreduce.runtime.arguments import Details
from ringreduce.runtime.submit import Array, like, listed, only, outs_of, refused

__all__ = ["allgather", "allgather_async", "alltoall", "alltoall_async", "grouped_allgather"]
__all__ += ["grouped_allgather_async"]


def allgather(
    tensor: Array,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    out: Any = None,
) -> Array:
    """Concatenate the tensors of all ranks along dim 0, in rank order.

    Shape:  at least 1-d; dim 0 may differ per rank (and be 0), the others must be equal.
    name:   as in `allreduce`.
    out:    an array for the result, of its shape and type, which is returned. In a loop of large ones this is faster:
            new memory costs more than to move the elements. Any rank may pass one, or not.
    Cost:   size - 1 messages a rank, in which it sends all rows but one rank's; one agreement, and the row counts.
    Raises: InputError (a ValueError) for a 0-d tensor, or another `out`; MismatchError; PeerLostError.
    Source: Horovod's allgather.
    """
    return runtime.at_once("allgather", name, tensor, out, {}, process_set, allgather_async, out=out)  # type: ignore[no-any-return]


def allgather_async(
    tensor: Array,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    out: Any = None,
    waits: bool = False,
) -> Handle[Array]:
    """Begin an `allgather`; `synchronize(handle)` returns its result.

    waits: the caller does so at once.
    """
    return _allgather([tensor], name, process_set, waits, out=out).mapped(only)


def grouped_allgather(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Gather many tensors, all or none of them; otherwise as `allgather`."""
    return _allgather(tensors, name, process_set, waits=True).wait()


def grouped_allgather_async(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Array]]:
    """Begin a `grouped_allgather`; `synchronize(handle)` returns the list of results."""
    return gather_with(tensors, name, process_set)


def gather_with(
    tensors: Sequence[Array], name: str | None, process_set: ProcessSet = global_process_set, details: Details = ()
) -> Handle[list[Array]]:
    """As `grouped_allgather_async`.  details: further arguments that must be equal on all ranks."""
    return _allgather(tensors, name, process_set, False, details)


def _allgather(
    tensors: Sequence[Array],
    name: str | None,
    process_set: ProcessSet,
    waits: bool,
    details: Details = (),
    out: Any = None,
) -> Handle[list[Array]]:
    current, number = runtime.current("allgather"), number_of(process_set, "allgather")
    tensors = placed("allgather", name, process_set, listed, "allgather", tensors)

    def finish(submission: Submission) -> list[Any]:
        return [like(tensor, output) for tensor, output in zip(tensors, submission.outputs, strict=True)]

    try:
        inputs = with_rows(tensors)
        outputs, into = outs_of("allgather", out, inputs, finish)
        return current.engine.submit(
            "allgather",
            name,
            number,
            details=details,
            by_rows=True,
            inputs=inputs,
            outputs=outputs,
            finish=into,
            waits=waits,
        )
    except InputError as exc:
        raise refused("allgather", exc, number, name, None, len(tensors)) from exc.__cause__


def with_rows(tensors: Sequence[Any]) -> list[Buffer]:
    """Their buffers; an InputError, for one without rows too, says `at` which."""
    buffers = as_buffers(tensors)
    for number, each in enumerate(buffers):
        if not each.shape:
            error = InputError("a 0-d tensor has no rows; pass one of at least 1 dimension")
            error.at = number
            raise error
    return buffers


def alltoall(
    tensor: Array, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send each rank its part of `tensor`'s rows, and return what all ranks sent to this one, in rank order.

    Shape:  at least 1-d; dim 0 may differ per rank, the others must be equal.
    splits: the rows for each rank: integers, (size,), whose sum is dim 0. None: equal parts.
    Returns: the received rows; with splits (rows, received_splits), the latter in the form of `splits`.
    Cost:   size - 1 messages a rank; all rows but the rank's own part sent by each; one agreement, and the splits.
    Raises: InputError (a ValueError) for a 0-d tensor, wrong splits, or rows that cannot be split equally.
    Source: Horovod's alltoall.
    """
    return _alltoall(tensor, splits, name, process_set, waits=True).wait()


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin an `alltoall`; `synchronize(handle)` returns its result."""
    return _alltoall(tensor, splits, name, process_set, waits=False)


def _alltoall(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet, waits: bool) -> Handle:
    current, number = runtime.current("alltoall"), number_of(process_set, "alltoall")
    size = process_set.size() or 0

    def finish(submission: Submission) -> Any:
        rows = like(tensor, submission.outputs[0])
        if splits is None:
            return rows
        return rows, as_given(submission.payload)

    options: dict[str, Any] = {"by_rows": True, "finish": finish, "waits": waits}
    try:
        (mine,) = with_rows([tensor])
        parts = equal_splits(mine.shape[0], size) if splits is None else _given_splits(splits, mine.shape[0], size)
        as_given = _as_given(splits)  # here, as it may refuse them
        return current.engine.submit("alltoall", name, number, inputs=[mine], payload=parts, **options)
    except InputError as exc:
        raise refused("alltoall", exc, number, name) from exc.__cause__


def equal_splits(rows: int, size: int) -> list[int]:
    """How many rows each of so many ranks gets; raises InputError where they do not come out even."""
    if size and rows % size:
        raise _of_rows(f"{rows} rows cannot be split equally among {size} ranks; pass splits, or a multiple of {size}")
    return [rows // max(1, size)] * size


def _given_splits(splits: Any, rows: int, size: int) -> list[int]:
    given = splits.tolist() if hasattr(splits, "tolist") else list(splits) if isinstance(splits, Sequence) else splits
    what = f"splits={given}"
    is_list = isinstance(given, list) and len(given) == size
    if not is_list or not all(type(n) is not bool and isinstance(n, int | np.integer) and n >= 0 for n in given):
        raise _of_rows(f"{what}; expected {size} whole numbers of 0 or more, one for each rank")
    if sum(given) != rows:
        has = (
            f"only {rows} rows"
            if sum(given) > rows
            else f"{rows} rows: each must go to a rank; pass tensor[:{sum(given)}]"
        )
        raise _of_rows(f"{what} sum to {sum(given)}, but the tensor has {has}")
    return [int(n) for n in given]


def _of_rows(why: str) -> InputError:
    """The error for a tensor's rows, or for the splits that are to divide them."""
    error = InputError(why)
    error.at = 0
    return error


def _as_given(splits: Any) -> Callable[[Sequence[int]], Any]:
    """What makes received splits an array of the caller's kind, of NumPy for a plain list; wider where it must be."""
    storage, given = np.dtype(np.int32), None
    try:
        if hasattr(splits, "dtype"):
            storage = element_type(splits.dtype).storage
            given = None if is_torch(splits) else as_buffer(splits)
    except UnsupportedArrayError as exc:
        raise _of_rows(f"splits: {exc}") from exc.__cause__

    def as_given(received: Sequence[int]) -> Any:
        fits = max(received, default=0) <= np.iinfo(storage).max
        if is_torch(splits):
            return splits.new_tensor(received, dtype=splits.dtype if fits else sys.modules["torch"].int64)
        whole = np.array(received, storage if fits else np.int64)
        return uploaded(whole, given.index) if isinstance(given, GpuBuffer) else whole

    return as_given
