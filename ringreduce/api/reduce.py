"""allreduce and reducescatter, in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.api.submit import Array, like, which_op
from ringreduce.buffers import Buffer, as_buffer
from ringreduce.compression import Compression, Compressor, compress_all, decompress_all
from ringreduce.engine.description import Description, describe, names_of
from ringreduce.engine.request import Handle, Request
from ringreduce.errors import InputError
from ringreduce.ops import Average, ReduceOp, Reduction, Sum


def allreduce(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce `tensor` over all ranks; returns a new array, the same bits on every rank.

    Shape:  any, equal on all ranks; all types of `ringreduce.dtypes`. A number gives a NumPy number.
    average: Horovod's older form of op: True is Average, False Sum.
    name:   by it the ranks' tensors meet; without one they are numbered, and the order of calls must be the same.
    compression: `Compression.fp16` or `.bf16` send floating-point elements in 16 bits.
    op:     Average (the default; bool: an error; integers: truncated toward zero), Sum, Min, Max (complex: errors),
            Product, Adasum (floating-point, a power of two of ranks).
    Scale:  prescale_factor multiplies what goes in, postscale_factor what comes out.
    Cost:   2 (size - 1) messages a rank, about 2 nbytes (size - 1) / size sent by each, slot by slot; one agreement.
    Raises: InputError (a ValueError) for a wrong argument, or a name that is pending; MismatchError on all ranks when
            they pass different shapes, types, ops, scales or kinds of device; PeerLostError.
    Source: Horovod's allreduce; the ring of Patarasuk & Yuan, 2009.

    >>> allreduce(np.float32(rank()))                                                                  # doctest: +SKIP
    np.float32(1.5)
    """
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce`; `synchronize(handle)` gives its result. `tensor` must not change until then."""
    reduction = _Arguments("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    return _submit([tensor], False, name, None, reduction, lambda results: results[0])


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
    return grouped_allreduce_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)[0]


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce_`; `tensor` must be left alone until `synchronize(handle)` returns it."""
    reduction = _Arguments("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    return _submit([tensor], True, name, None, reduction, lambda results: results[0])


def grouped_allreduce(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    names: Sequence[str] | None = None,
) -> list[Array]:
    """Reduce many tensors, all or none of them; returns new arrays. Otherwise as `allreduce`.

    name:  that of the group;  names: those of the tensors, for error messages.
    Cost:  one agreement for all; small ones travel together.
    """
    reduction = _Arguments("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    compressed, contexts = compress_all(compression, tensors)
    reduced = _submit(compressed, False, name, names, reduction, list, waits=True).wait()
    return decompress_all(compression, reduced, contexts)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    names: Sequence[str] | None = None,
) -> Handle:
    """Begin a `grouped_allreduce`; `synchronize(handle)` gives the list of results."""
    reduction = _Arguments("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    return _submit(tensors, False, name, names, reduction, list)


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
    reduction = _Arguments("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    handle = _submit(tensors, True, name, names, reduction, list, waits=True)
    result: list[Array] = handle.wait()
    return result


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    names: Sequence[str] | None = None,
) -> Handle:
    """Begin a `grouped_allreduce_`; `synchronize(handle)` gives the list of tensors."""
    reduction = _Arguments("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    return _submit(tensors, True, name, names, reduction, list)


def reducescatter(
    tensor: Array,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce `tensor` over all ranks; each rank gets its part of the rows, as a new array.

    Shape:  (rows, ...), equal on all ranks; the result (rows // size, ...), one row more on the first rows % size.
    op:     Average or Sum.
    Cost:   size - 1 messages a rank, about nbytes (size - 1) / size sent by each; one agreement.
    Raises: InputError (a ValueError) for a 0-d tensor or another op; and as `allreduce`.
    Source: Horovod's reducescatter; the first half of the ring.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `reducescatter`; `synchronize(handle)` gives its result."""
    reduction = _Arguments("reducescatter", None, op, prescale_factor, postscale_factor, process_set)
    return _submit([tensor], False, name, None, reduction, lambda results: results[0])


def grouped_reducescatter(
    tensors: Sequence[Array],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Reduce and scatter many tensors, all or none of them; otherwise as `reducescatter`."""
    reduction = _Arguments("reducescatter", None, op, prescale_factor, postscale_factor, process_set)
    compressed, contexts = compress_all(compression, tensors)
    reduced = _submit(compressed, False, name, None, reduction, list, waits=True).wait()
    return decompress_all(compression, reduced, contexts)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `grouped_reducescatter`; `synchronize(handle)` gives the list of results."""
    reduction = _Arguments("reducescatter", None, op, prescale_factor, postscale_factor, process_set)
    return _submit(tensors, False, name, None, reduction, list)


class _Arguments:
    """What is to be done to the elements, and where; checked as far as one rank can."""

    def __init__(
        self,
        function: str,
        average: bool | None,
        op: ReduceOp | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> None:
        self.current = runtime.current(function)
        self.function = function
        self.op = which_op(function, average, op)
        if function == "reducescatter" and self.op not in (Average, Sum):
            raise InputError(f"reducescatter: op={self.op!r}; expected Average or Sum")
        self.scales = float(prescale), float(postscale)
        self.process_set = number_of(process_set, function)

    def check(self, tensor: Buffer) -> None:
        """Raise InputError for a tensor that cannot be reduced so."""
        Reduction(self.op, tensor.element, 1, *self.scales).check()
        if self.function == "reducescatter" and not tensor.shape:
            raise InputError("reducescatter: a 0-d tensor has no rows to scatter; pass one of at least 1 dimension")

    @property
    def details(self) -> tuple[tuple[str, Any], ...]:
        """For the agreement."""
        prescale, postscale = self.scales
        return (("op", self.op.value), ("prescale_factor", prescale), ("postscale_factor", postscale))


def _submit(
    tensors: Sequence[Any],
    in_place: bool,
    name: str | None,
    names: Sequence[str] | None,
    arguments: _Arguments,
    result: Any,
    waits: bool = False,
) -> Handle:
    """Hand the tensors in; `result` makes the caller's result of the list of reduced arrays."""
    inputs = [as_buffer(tensor, writable=in_place) for tensor in tensors]
    for each in inputs:
        arguments.check(each)
    if names is not None and len(names) != len(tensors):
        raise InputError(f"{arguments.function}: {len(names)} names for {len(tensors)} tensors; pass one for each")
    outputs = inputs
    if not in_place and arguments.function == "allreduce":
        outputs = [each.empty(each.shape) for each in inputs]

    def description(name: str) -> Description:
        described = tuple(
            describe(each, own) for each, own in zip(inputs, names_of(name, names, len(inputs)), strict=True)
        )
        return Description(arguments.function, name, described, arguments.details)

    def finish(request: Request) -> Any:
        if in_place:
            return result(list(tensors))
        return result([like(tensor, output) for tensor, output in zip(tensors, request.outputs, strict=True)])

    return arguments.current.engine.submit(
        arguments.function,
        name,
        arguments.process_set,
        describe=description,
        inputs=inputs,
        outputs=outputs,
        finish=finish,
        waits=waits,
    )
