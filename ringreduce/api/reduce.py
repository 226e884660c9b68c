"""allreduce and reducescatter, in all their forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of, placed
from ringreduce.arrays.view import as_buffers, check_apart, to_write
from ringreduce.collectives.ops import Average, ReduceOp
from ringreduce.compression import AnyCompressor, Compression, check_compression
from ringreduce.errors import InputError
from ringreduce.execution.signature import calling_line
from ringreduce.execution.submission import Handle, Submission
from ringreduce.runtime.arguments import Arguments, arguments_of
from ringreduce.runtime.submit import Array, as_passed, like, listed, only, outs_of, refused, taken_apart

__all__ = ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_"]
__all__ += ["grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter"]
__all__ += ["grouped_reducescatter_async", "reducescatter", "reducescatter_async"]


def allreduce(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce `tensor` over all ranks; returns a new array, the same bits on every rank.

    tensor: an array or a number; or a tree of them, of dicts, lists and tuples, which is reduced as a group. Its arrays
            have names such as layers.0.w, the keys that lead to them; equal on all ranks. None stays None.
    Shape:  any, equal on all ranks; types: `ringreduce.arrays.dtypes`. Arrays are copied first if not C-contiguous.
            For a number the result is a NumPy number; the average of Python ints is a float.
    average: Horovod's older form of op: True is Average, False Sum.
    name:   by which tensors are matched; calls without one are numbered, and must be in the same order on all ranks.
    compression: `Compression.fp16` or `.bf16` send floating-point elements in 16 bits; `.int8` and `.int4` in fewer,
            from host to host, for Average and Sum: see `ringreduce.compression.Quantized`.
    op:     Average (the default; bool: an error; integer arrays: truncated toward zero), Sum, Min, Max (complex:
            errors), Product, Adasum (floating-point, a power of two of ranks).
    Scale:  prescale_factor multiplies the input, postscale_factor the result.
    Cost:   2 (size - 1) messages a rank, about 2 nbytes (size - 1) / size sent by each, slot by slot; one agreement.
    Raises: InputError (a ValueError) for a wrong argument, or a name that is pending; MismatchError on all ranks when
            they pass different shapes, types, ops, scales or kinds of device; PeerLostError.
    Source: Horovod's allreduce; the ring of Patarasuk & Yuan, 2009.

    >>> allreduce(np.float32(rank()))                                                                  # doctest: +SKIP
    np.float32(1.5)
    """
    if compression is not Compression.none:
        arrays, names, whole = placed("allreduce", name, process_set, taken_apart, tensor)
        scales = prescale_factor, postscale_factor
        reduced = grouped_allreduce(arrays, average, name, compression, op, *scales, process_set, names=names)
        return whole(reduced)  # type: ignore[no-any-return]
    array: Any = np.asarray(tensor) if isinstance(tensor, float | np.generic) else tensor
    given = {"average": average, "op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    result = runtime.at_once("allreduce", name, array, None, given, process_set, allreduce_async)
    return result if array is tensor else result[()]  # type: ignore[no-any-return]


def allreduce_async(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    waits: bool = False,
) -> Handle[Array]:
    """Begin an `allreduce`; `synchronize(handle)` returns its result. `tensor` must not change until then.

    waits: the caller does so at once.
    """
    given = average, op, prescale_factor, postscale_factor
    reduction = _arguments("allreduce", name, process_set, *given)
    arrays, names, whole = placed("allreduce", name, process_set, taken_apart, tensor)
    return submit(arrays, name, names, reduction, process_set, waits=waits).mapped(whole)


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce `tensor` over all ranks in place, and return it; otherwise as `allreduce`."""
    given = {"average": average, "op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return runtime.at_once("allreduce", name, tensor, tensor, given, process_set, allreduce_async_)  # type: ignore[no-any-return]


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    waits: bool = False,
) -> Handle[Array]:
    """Begin an `allreduce_`; `tensor` must not be used until `synchronize(handle)` returns it.

    waits: the caller does so at once.
    """
    given = average, op, prescale_factor, postscale_factor
    reduction = _arguments("allreduce", name, process_set, *given)
    arrays, names, whole = placed("allreduce", name, process_set, taken_apart, tensor)
    if names is not None:
        whole = lambda _: tensor  # noqa: E731 - the caller's tree itself; one array needs no closure
    return submit(arrays, name, names, reduction, process_set, in_place=True, waits=waits).mapped(whole)


def grouped_allreduce(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    names: Sequence[str] | None = None,
) -> list[Array]:
    """Reduce many tensors, all or none of them; returns new arrays. Otherwise as `allreduce`.

    name:  of the group;  names: of the tensors, for error messages.
    Cost:  one agreement for all; small tensors are fused.
    """
    given = average, op, prescale_factor, postscale_factor, compression
    reduction = _arguments("allreduce", name, process_set, *given)
    return _compressed(compression, tensors, name, names, reduction, process_set)


def grouped_allreduce_async(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    names: Sequence[str] | None = None,
) -> Handle[list[Array]]:
    """Begin a `grouped_allreduce`; `synchronize(handle)` returns the list of results."""
    given = average, op, prescale_factor, postscale_factor
    reduction = _arguments("allreduce", name, process_set, *given)
    return submit(tensors, name, names, reduction, process_set)


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    names: Sequence[str] | None = None,
) -> list[Array]:
    """Reduce many tensors in place, all or none of them, and return them; otherwise as `grouped_allreduce`."""
    given = average, op, prescale_factor, postscale_factor
    reduction = _arguments("allreduce", name, process_set, *given)
    return submit(tensors, name, names, reduction, process_set, in_place=True, waits=True).wait()


def grouped_allreduce_async_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    names: Sequence[str] | None = None,
) -> Handle[list[Array]]:
    """Begin a `grouped_allreduce_`; `synchronize(handle)` returns the list of tensors."""
    given = average, op, prescale_factor, postscale_factor
    reduction = _arguments("allreduce", name, process_set, *given)
    return submit(tensors, name, names, reduction, process_set, in_place=True)


def reducescatter(
    tensor: Array,
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    out: Any = None,
) -> Array:
    """Reduce `tensor` over all ranks; returns this rank's part of the rows, as a new array.

    Shape:  (rows, ...), equal on all ranks; the result (rows // size, ...), one row more on the first rows % size.
    out:    an array for the result, as in `allgather`; without compression.
    op:     Average or Sum.
    Cost:   size - 1 messages a rank, about nbytes (size - 1) / size sent by each; one agreement.
    Raises: InputError (a ValueError) for a 0-d tensor, another op or another `out`; and as `allreduce`.
    Source: Horovod's reducescatter; the first half of the ring.
    """
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    if compression is not Compression.none:
        if out is not None:
            error = InputError(f"reducescatter: out, with compression={compression!r}; pass one of the two")
            raise refused("reducescatter", error, number_of(process_set, "reducescatter"), name)
        return grouped_reducescatter([tensor], name, compression, op, process_set, **scales)[0]
    own = {"op": op, **scales}, process_set, reducescatter_async
    return runtime.at_once("reducescatter", name, tensor, out, *own, out=out)  # type: ignore[no-any-return]


def reducescatter_async(
    tensor: Array,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    out: Any = None,
    waits: bool = False,
) -> Handle[Array]:
    """Begin a `reducescatter`; `synchronize(handle)` returns its result.

    waits: the caller does so at once.
    """
    given = None, op, prescale_factor, postscale_factor
    reduction = _arguments("reducescatter", name, process_set, *given)
    return submit([tensor], name, None, reduction, process_set, waits=waits, out=out).mapped(only)


def grouped_reducescatter(
    tensors: Sequence[Array],
    name: str | None = None,
    compression: AnyCompressor = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Reduce and scatter many tensors, all or none of them; otherwise as `reducescatter`."""
    given = None, op, prescale_factor, postscale_factor, compression
    reduction = _arguments("reducescatter", name, process_set, *given)
    return _compressed(compression, tensors, name, None, reduction, process_set)


def grouped_reducescatter_async(
    tensors: Sequence[Array],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Array]]:
    """Begin a `grouped_reducescatter`; `synchronize(handle)` returns the list of results."""
    given = None, op, prescale_factor, postscale_factor
    reduction = _arguments("reducescatter", name, process_set, *given)
    return submit(tensors, name, None, reduction, process_set)


def _arguments(function: str, name: str | None, process_set: ProcessSet, *given: Any) -> Arguments:
    return placed(function, name, process_set, arguments_of, function, *given)


def _compressed(
    compression: AnyCompressor,
    tensors: Sequence[Array],
    name: str | None,
    names: Sequence[str] | None,
    arguments: Arguments,
    process_set: ProcessSet,
) -> list[Array]:
    function = arguments.function
    tensors = placed(function, name, process_set, listed, function, tensors)
    pairs = placed(function, name, process_set, _compress, compression, tensors)
    reduced = submit([tensor for tensor, _ in pairs], name, names, arguments, process_set, waits=True).wait()
    return [
        as_passed(tensor, compression.decompress(each, context))
        for tensor, each, (_, context) in zip(tensors, reduced, pairs, strict=True)
    ]


def _compress(compression: AnyCompressor, tensors: Sequence[Array]) -> list[tuple[Any, Any]]:
    check_compression(compression)
    return [compression.compress(tensor) for tensor in tensors]


def submit(
    tensors: Sequence[Array],
    name: str | None,
    names: Sequence[str] | None,
    arguments: Arguments,
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    waits: bool = False,
    line: str | None = None,
    of_step: bool = False,
    out: Any = None,
) -> Handle[list[Array]]:
    """Submit the tensors; the handle returns the reduced ones.

    line: the line of the user's script, where the caller knows it.  of_step: as of the engine's submit().
    """
    function = arguments.function
    if not isinstance(tensors, list):
        tensors = placed(function, name, process_set, listed, function, tensors)
    engine, number = runtime.current(function).engine, number_of(process_set, function)
    try:
        inputs, written = to_write(tensors) if in_place else (as_buffers(tensors, arguments.number), None)
        if names is not None and len(names) != len(tensors):
            raise InputError(f"{function}: {len(names)} names for {len(tensors)} tensors; pass one for each")
        if in_place and len(set(map(id, tensors))) < len(tensors):  # what else shares memory is found the first time
            check_apart(inputs)
        outputs: list[Any] = inputs
        into: Callable[[Submission], list[Any]] = _finish
        if function != "allreduce":
            outputs, into = outs_of(function, out, inputs, _finish)
        elif not in_place:
            outputs = [each.empty(each.shape) for each in inputs]
        return engine.submit(
            function,
            name,
            number,
            details=arguments.details,
            names=None if names is None else tuple(names),
            check=arguments.check,
            together=check_apart if in_place else None,
            inputs=inputs,
            outputs=outputs,
            finish=into,
            payload=(tensors, written),
            waits=waits,
            line=line or calling_line(3),
            of_step=of_step,
        )
    except InputError as exc:
        raise refused(function, exc, number, name, names, len(tensors)) from exc.__cause__


def _finish(submission: Submission) -> list[Any]:
    """The caller's results.  payload: the tensors that were passed, and what `to_write` returned for those in place."""
    tensors, written = submission.payload
    if written is None:
        return [like(tensor, output) for tensor, output in zip(tensors, submission.outputs, strict=True)]
    written()
    return list(tensors)
