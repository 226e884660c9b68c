"""allreduce and reducescatter, in all their forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce import runtime
from ringreduce.api.process_sets import ProcessSet, global_process_set, number_of
from ringreduce.api.submit import Array, like, which_op
from ringreduce.arrays.buffer import Buffer
from ringreduce.arrays.dtypes import ElementType, element_type
from ringreduce.arrays.view import as_buffer, to_write
from ringreduce.compression import Compression, Compressor
from ringreduce.errors import InputError
from ringreduce.execution.signature import Signature, TensorSignature, kind_of_device, names_of, sign
from ringreduce.execution.submission import Handle, Submission
from ringreduce.log import LOGGER
from ringreduce.ops import Average, ReduceOp, Reduction, Sum

__all__ = ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_"]
__all__ += ["grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter"]
__all__ += ["grouped_reducescatter_async", "reducescatter", "reducescatter_async"]


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

    Shape:  any, equal on all ranks; types: `ringreduce.arrays.dtypes`. Arrays are copied first if not C-contiguous.
            For a number the result is a NumPy number; the average of Python ints is a float.
    average: Horovod's older form of op: True is Average, False Sum.
    name:   by which tensors are matched; calls without one are numbered, and must be in the same order on all ranks.
    compression: `Compression.fp16` or `.bf16` send floating-point elements in 16 bits.
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
    scales = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *scales, process_set)[0]


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce`; `synchronize(handle)` returns its result. `tensor` must not change until then."""
    reduction = arguments_of("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    return submit([tensor], name, None, reduction, one=True)


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
    scales = prescale_factor, postscale_factor
    result: Array = _in_place(tensor, average, name, op, *scales, process_set, waits=True).wait()
    return result


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce_`; `tensor` must not be used until `synchronize(handle)` returns it."""
    return _in_place(tensor, average, name, op, prescale_factor, postscale_factor, process_set, waits=False)


class _Known(NamedTuple):
    """A named call that has passed all checks: an equal one needs none."""

    process_set: ProcessSet
    number: Any  # the process set's, which it loses when it is removed
    arguments: tuple[Any, ...]  # but the array
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    element: ElementType
    sign: Callable[[str], Signature]  # always this call's signature


_known: dict[str | None, _Known] = {}
MOST_KNOWN = 32768


def _in_place(
    tensor: Any,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    waits: bool,
) -> Handle:
    """Submit one tensor, which gets the result; a gradient in NumPy's memory comes again with each step."""
    known = _known.get(name)
    if (
        known is not None
        and type(tensor) is np.ndarray
        and tensor.dtype is known.dtype
        and tensor.shape == known.shape
        and tensor.flags.carray
        and process_set is known.process_set
        and process_set.process_set_id == known.number
        and known.arguments == (average, op, prescale, postscale)
    ):
        _, number, _, dtype, shape, element, sign = known
        inputs = [Buffer(tensor.reshape(-1), element, shape, "cpu", dtype)]
        engine = runtime.current("allreduce").engine
        return engine.submit(
            "allreduce",
            name,
            number,
            sign=sign,
            inputs=inputs,
            outputs=inputs,
            finish=_payload,
            payload=tensor,
            waits=waits,
        )
    arguments = arguments_of("allreduce", average, op, prescale, postscale, process_set)
    handle = submit([tensor], name, None, arguments, in_place=True, one=True, waits=waits)
    if name is not None and type(tensor) is np.ndarray and tensor.flags.carray:
        element, signature = element_type(tensor.dtype), handle.signature
        if element.storage is tensor.dtype:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            passed, array = (average, op, float(prescale), float(postscale)), (tensor.dtype, tensor.shape, element)
            _known[name] = _Known(process_set, process_set.process_set_id, passed, *array, lambda _: signature)
    return handle


def _payload(submission: Submission) -> Any:
    return submission.payload


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

    name:  of the group;  names: of the tensors, for error messages.
    Cost:  one agreement for all; small tensors are fused.
    """
    reduction = arguments_of("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    return _compressed(compression, tensors, name, names, reduction)


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
    """Begin a `grouped_allreduce`; `synchronize(handle)` returns the list of results."""
    reduction = arguments_of("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    return submit(tensors, name, names, reduction)


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
    reduction = arguments_of("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    result: list[Array] = submit(tensors, name, names, reduction, in_place=True, waits=True).wait()
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
    """Begin a `grouped_allreduce_`; `synchronize(handle)` returns the list of tensors."""
    reduction = arguments_of("allreduce", average, op, prescale_factor, postscale_factor, process_set)
    return submit(tensors, name, names, reduction, in_place=True)


def reducescatter(
    tensor: Array,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce `tensor` over all ranks; returns this rank's part of the rows, as a new array.

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
    """Begin a `reducescatter`; `synchronize(handle)` returns its result."""
    reduction = arguments_of("reducescatter", None, op, prescale_factor, postscale_factor, process_set)
    return submit([tensor], name, None, reduction, one=True)


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
    reduction = arguments_of("reducescatter", None, op, prescale_factor, postscale_factor, process_set)
    return _compressed(compression, tensors, name, None, reduction)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `grouped_reducescatter`; `synchronize(handle)` returns the list of results."""
    reduction = arguments_of("reducescatter", None, op, prescale_factor, postscale_factor, process_set)
    return submit(tensors, name, None, reduction)


def _compressed(
    compression: type[Compressor],
    tensors: Sequence[Array],
    name: str | None,
    names: Sequence[str] | None,
    arguments: Arguments,
) -> list[Array]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    reduced = submit([tensor for tensor, _ in pairs], name, names, arguments, waits=True).wait()
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs, strict=True)]


class Arguments:
    """The arguments of a reduction; calls with equal arguments share one object."""

    def __init__(self, function: str, op: ReduceOp, prescale: float, postscale: float, process_set: int) -> None:
        if function == "reducescatter" and op not in (Average, Sum):
            raise InputError(f"reducescatter: op={op!r}; expected Average or Sum")
        self.function = function
        self.process_set = process_set
        self._op = op
        self._scales = prescale, postscale
        self.details = (("op", op.value), ("prescale_factor", prescale), ("postscale_factor", postscale))
        self.fitting: set[str] = set()  # element types that need no check any more

    def number(self, tensor: Any) -> Any:
        """A Python int that is averaged becomes a float: the caller has chosen no integer type for it."""
        return float(tensor) if type(tensor) is int and self._op is Average else tensor

    def check(self, tensor: Buffer) -> None:
        """Raise InputError for a tensor that cannot be reduced this way."""
        Reduction(self._op, tensor.element, 1, *self._scales).check()
        if self._op is Average and tensor.element.kind in "iu":
            _warn_of_truncated_averages()
        if self.function != "reducescatter":
            self.fitting.add(tensor.element.name)
        elif not tensor.shape:
            raise InputError("reducescatter: a 0-d tensor has no rows to scatter; pass one of at least 1 dimension")

    def sign(self, inputs: Sequence[Buffer], names: Sequence[str] | None, name: str) -> Signature:
        """The signature by which ranks agree."""
        if len(inputs) == 1 and names is None:
            only = inputs[0]
            return _sign_one(self, name, only.element.name, only.shape, only.device)
        own = names_of(name, names, len(inputs))
        described = tuple(sign(each, one) for each, one in zip(inputs, own, strict=True))
        return Signature(self.function, name, described, self.details)


def arguments_of(
    function: str, average: bool | None, op: ReduceOp | None, prescale: float, postscale: float, process_set: ProcessSet
) -> Arguments:
    """The arguments of a call, checked as far as possible without the tensors."""
    op = which_op(function, average, op)
    return _same_arguments(function, op, float(prescale), float(postscale), number_of(process_set, function))


@functools.cache
def _warn_of_truncated_averages() -> None:
    LOGGER.warning(
        "averages of integer arrays are truncated to whole numbers, as in Horovod; pass floats, or op=Sum (shown once)"
    )


_same_arguments = functools.lru_cache(maxsize=256)(Arguments)


@functools.lru_cache(maxsize=32768)
def _sign_one(arguments: Arguments, name: str, dtype: str, shape: tuple[int, ...], device: str) -> Signature:
    """The signature of one tensor: a gradient's is the same in every step."""
    described = TensorSignature(name, dtype, shape, kind_of_device(device))
    return Signature(arguments.function, name, (described,), arguments.details)


def submit(
    tensors: Sequence[Any],
    name: str | None,
    names: Sequence[str] | None,
    arguments: Arguments,
    *,
    in_place: bool = False,
    one: bool = False,
    waits: bool = False,
    line: str | None = None,
) -> Handle:
    """Submit the tensors; the handle returns the list of reduced arrays, or the only array when `one`.

    line: the line of the user's script, where the caller knows it.
    """
    engine = runtime.current(arguments.function).engine
    if in_place:
        inputs, written = to_write(tensors)
    else:
        inputs, written = [as_buffer(arguments.number(tensor)) for tensor in tensors], None
    for each in inputs:
        if each.element.name not in arguments.fitting:
            arguments.check(each)
    if names is not None and len(names) != len(tensors):
        raise InputError(f"{arguments.function}: {len(names)} names for {len(tensors)} tensors; pass one for each")
    has_outputs = not in_place and arguments.function == "allreduce"
    outputs = [each.empty(each.shape) for each in inputs] if has_outputs else inputs

    return engine.submit(
        arguments.function,
        name,
        arguments.process_set,
        sign=functools.partial(arguments.sign, inputs, names),
        inputs=inputs,
        outputs=outputs,
        finish=_finish_one if one else _finish,
        payload=(tensors, written),
        waits=waits,
        line=line,
    )


def _finish(submission: Submission) -> list[Any]:
    """The caller's results.  payload: the tensors that were passed, and what `to_write` returned for those in place."""
    tensors, written = submission.payload
    if written is None:
        return [like(tensor, output) for tensor, output in zip(tensors, submission.outputs, strict=True)]
    written()
    return list(tensors)


def _finish_one(submission: Submission) -> Any:
    return _finish(submission)[0]
