"""The collectives on TensorFlow's tensors, by Horovod's names.

Each works eagerly and inside tf.function, and has a gradient: see frameworks/collective.py. Arguments have Horovod's
order; device_dense, device_sparse and ignore_name_scope are without effect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce import runtime
from ringreduce.api import broadcast as broadcasts
from ringreduce.api import control, gather, reduce
from ringreduce.api.process_sets import ProcessSet, global_process_set, placed
from ringreduce.arrays.dlpack import a_kind_of
from ringreduce.collectives.ops import Average, ReduceOp, Sum
from ringreduce.compression import wire_of
from ringreduce.errors import InputError, UnsupportedArrayError
from ringreduce.execution.signature import named
from ringreduce.frameworks.collective import (
    Call,
    Collective,
    Framework,
    gradients_of,
    with_signature_of,
)
from ringreduce.runtime.submit import Made, taken_apart
from ringreduce.tensorflow.host import on_host, unconverted
from ringreduce.tensorflow.world import when_it_runs

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allgather", "grouped_allreduce"]
__all__ += ["grouped_reducescatter", "reducescatter"]


_WITHOUT_EFFECT = {"device_dense": "", "device_sparse": "", "ignore_name_scope": False}
_SCALES = "prescale_factor postscale_factor"


def _collective(function: Callable[..., Any], order: str) -> Callable[[Callable[[Call], Any]], Callable[..., Any]]:
    """Decorate what does on tensors what `function` does on arrays.

    order: of the arguments in Horovod's function for TensorFlow, some of which no other framework's has.
    """
    names = order.split()
    more = {name: default for name, default in _WITHOUT_EFFECT.items() if name in names}
    return lambda run: unconverted(with_signature_of(function, names, **more)(run))


@_collective(
    reduce.allreduce,
    f"tensor average device_dense device_sparse compression op {_SCALES} name process_set ignore_name_scope",
)
def allreduce(call: Call) -> Any:
    """Reduce a tensor over all ranks; the same bits on every rank.

    tensor:   any tensor or variable, equal in shape and type on all ranks; or IndexedSlices, whose rows are gathered
              from all ranks, for Average divided by their number: the result has a row several times; or a tree of
              these, of dicts, lists and tuples.
    Gradient: for Average and Sum the same allreduce, compressed too; for other ops InputError.
    Raises:   as `ringreduce.allreduce`. Inside tf.function what ranks find out together is an error of TensorFlow's
              with that text.
    Source:   Horovod's allreduce.
    """
    tensors, names, whole = taken_apart(call.tensor)
    return whole(_reduced(tensors, names, call))


@_collective(
    reduce.grouped_allreduce,
    f"tensors average device_dense device_sparse compression op {_SCALES} process_set ignore_name_scope name",
)
def grouped_allreduce(call: Call) -> list[Any]:
    """Reduce many tensors, all or none of them; otherwise as `allreduce`.

    names: of the tensors, for error messages.
    """
    return _reduced(call.tensors, call.names, call)


def _reduced(tensors: Sequence[Any], names: Sequence[str] | None, call: Call) -> list[Any]:
    sparse = [number for number, each in enumerate(tensors) if isinstance(each, tf.IndexedSlices)]
    dense = [number for number in range(len(tensors)) if number not in set(sparse)]

    def checked() -> tuple[Collective, list[Any]]:
        collective = Collective.of("allreduce", vars(call) | {"names": names and [names[number] for number in dense]})
        if sparse and (wire := wire_of(call.compression)) is not None:
            raise InputError(
                f"allreduce: IndexedSlices with compression={wire}; expected dense tensors: pass sparse_as_dense=True "
                "to the optimizer, tf.convert_to_tensor(…) here, or another compression"
            )
        if sparse and collective.op not in (Average, Sum):
            expected = "expected Average or Sum, or tf.convert_to_tensor"
            raise InputError(f"allreduce: op={collective.op!r} of IndexedSlices; {expected}")
        return collective, _converted(collective, [tensors[number] for number in dense], call.name)

    collective, inputs = _in_place("allreduce", call, checked)
    results = list(tensors)
    for number, each in zip(dense, _applied(collective, inputs), strict=True):
        results[number] = each
    for number in sparse:
        own = None if call.name is None else f"{call.name}.{number}"
        scale = call.prescale_factor * call.postscale_factor
        results[number] = _gathered_slices(tensors[number], own, collective.op, scale, call.process_set)
    return results


def _gathered_slices(slices: Any, name: str | None, op: ReduceOp, scale: float, process_set: ProcessSet) -> Any:
    values, indices = grouped_allgather([slices.values, slices.indices], name, process_set=process_set)
    gathered = tf.IndexedSlices(values, indices, slices.dense_shape)
    gathered = scaled(gathered, scale)
    return averaged(gathered, process_set) if op is Average else gathered


def averaged(tensor: Any, process_set: ProcessSet) -> Any:
    """A tensor, or IndexedSlices, divided by the number of ranks, in an elastic job that when the graph runs."""
    size = when_it_runs(process_set.size)
    return scaled(tensor, 1 / tf.cast(size, tf.float64) if tf.is_tensor(size) else 1 / (size or 1))


def scaled(tensor: Any, factor: Any) -> Any:
    """A tensor, or IndexedSlices, times a number; whole numbers are truncated."""
    if not tf.is_tensor(factor) and factor == 1:
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(tensor.values, factor), tensor.indices, tensor.dense_shape)
    if tensor.dtype.is_integer:
        return tf.cast(tf.cast(tensor, tf.float64) * tf.cast(factor, tf.float64), tensor.dtype)
    return tensor * tf.cast(factor, tensor.dtype)


@_collective(gather.allgather, "tensor name ignore_name_scope process_set")
def allgather(call: Call) -> Any:
    """Concatenate the tensors of all ranks along dim 0, in rank order; the number of rows may differ.

    Gradient: this rank's rows of the result's gradient, averaged over the ranks.
    Otherwise as `ringreduce.allgather`.  Source: Horovod's allgather.
    """
    return _called("allgather", call, [call.tensor])[0]


@_collective(gather.grouped_allgather, "tensors name ignore_name_scope process_set")
def grouped_allgather(call: Call) -> list[Any]:
    """Gather many tensors, all or none of them; otherwise as `allgather`."""
    return _called("allgather", call, call.tensors)


@_collective(broadcasts.broadcast, "tensor root_rank name ignore_name_scope process_set")
def broadcast(call: Call) -> Any:
    """The root's tensor on every rank; otherwise as `ringreduce.broadcast`.

    Gradient: on the root the result's, averaged over the ranks; elsewhere zeros.
    Source:   Horovod's broadcast.
    """
    return _called("broadcast", call, [call.tensor])[0]


@_collective(gather.alltoall, "tensor splits name ignore_name_scope process_set")
def alltoall(call: Call) -> Any:
    """Send each rank its part of the rows, and return what all ranks sent to this one, in rank order.

    splits:   the rows for each rank, (size,), and the result is (rows, received_splits). None: equal parts.
    Gradient: sent back to where the rows came from.
    Source:   Horovod's alltoall.
    """
    rows, received = _called(
        "alltoall", call, [call.tensor, *_in_place("alltoall", call, lambda: _splits(call.splits))]
    )
    return rows if call.splits is None else (rows, received)


def _splits(given: Any) -> list[Any]:
    """As one tensor, if there are any."""
    if given is None:
        return []
    splits = tf.convert_to_tensor(given)
    if not splits.dtype.is_integer:
        raise InputError(f"alltoall: splits of type {splits.dtype.name}; expected whole numbers, one for each rank")
    return [tf.saturate_cast(splits, tf.int32)]  # what is too large stays wrong


@_collective(reduce.reducescatter, f"tensor device_dense compression op name process_set ignore_name_scope {_SCALES}")
def reducescatter(call: Call) -> Any:
    """Reduce a tensor over all ranks; returns this rank's part of the rows.

    Gradient: an allgather of the parts' gradients, times both factors, and for Sum times the number of ranks.
    Otherwise as `ringreduce.reducescatter`.  Source: Horovod's reducescatter.
    """
    return _called("reducescatter", call, [call.tensor])[0]


@_collective(reduce.grouped_reducescatter, f"tensors device_dense compression op process_set {_SCALES}")
def grouped_reducescatter(call: Call) -> list[Any]:
    """Reduce and scatter many tensors, all or none of them; otherwise as `reducescatter`."""
    return _called("reducescatter", call, call.tensors)


@unconverted
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it; inside tf.function it has its place in the order of the collectives."""

    def forward(_: list[Any]) -> list[Any]:
        control.barrier(process_set)
        return []

    on_host("barrier", forward, [], [])


def _called(kind: str, call: Call, tensors: Sequence[Any]) -> list[Any]:
    """The results of such a collective with these arguments."""

    def made() -> tuple[Collective, list[Any]]:
        collective = Collective.of(kind, vars(call))
        return collective, _converted(collective, tensors, call.name)

    return _applied(*_in_place(kind, call, made))


def _in_place(kind: str, call: Call, make: Callable[[], Made]) -> Made:
    """See `placed`; in a graph, which others may trace at another time, nothing has a place."""
    return placed(kind, call.name, call.process_set, make) if tf.executing_eagerly() else make()


def _converted(it: Collective, tensors: Sequence[Any], name: str | None) -> list[Any]:
    """As tensors; raises UnsupportedArrayError, which names what is none."""
    inputs = []
    for number, each in enumerate(tensors):
        try:
            inputs.append(tf.convert_to_tensor(each))
        except (TypeError, ValueError) as error:
            which = f"{it.kind}{named(name, it.names, number, len(tensors))}"
            raise UnsupportedArrayError(f"{which}: {a_kind_of(each)} is no tensor; {_instead_of(each)}") from error
    return inputs


def _instead_of(value: Any) -> str:
    """What to pass in place of something that is no tensor."""
    if isinstance(value, tf.RaggedTensor):
        return "pass its values and its row_splits, or value.to_tensor()"
    if isinstance(value, tf.SparseTensor):
        return "pass its values and its indices, or tf.sparse.to_dense(value)"
    return "leave it out on all ranks, or pass what tf.convert_to_tensor takes"


def _applied(collective: Collective, inputs: Sequence[Any]) -> list[Any]:
    """The results of a collective, with its gradient."""
    if not inputs:
        return []
    kinds = [_of_other_rows(each) if collective.by_rows else each for each in inputs]
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in kinds]
    if collective.kind == "alltoall":
        size = None if runtime.current("alltoall").is_elastic else collective.process_set.size() or 1
        specs[1:] = [tf.TensorSpec([size], tf.int32)]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*inputs: Any) -> Any:
        results = on_host(collective.kind, lambda arrays: _ran(collective, arrays), inputs, specs)

        def gradient(*gradients: Any) -> list[Any]:
            rows = tf.stack([tf.shape(each)[0] for each in inputs]) if collective.by_rows else None
            of_results = [tf.convert_to_tensor(each) for each in gradients]
            of_inputs = gradients_of(collective, of_results, _TENSORFLOW, rows, results[-1])
            return [*of_inputs, *[None] * (len(inputs) - len(of_inputs))]  # of splits

        return results, gradient

    return list(call(*inputs))


_TENSORFLOW = Framework(
    sys.modules[__name__],
    tf.cumsum,
    "tf.stop_gradient",
    number=when_it_runs,
    scaled=scaled,
    kept=lambda condition, tensor: tf.where(condition, tensor, tf.zeros_like(tensor)),
)


def _ran(it: Collective, arrays: list[Any]) -> list[Any]:
    found = _run(it, arrays)
    it.ended()
    return found


def _run(it: Collective, arrays: list[Any]) -> list[Any]:
    """The results, as NumPy's arrays."""
    match it.kind:
        case "allreduce":
            arguments = it.name, it.compression, it.op, *it.scales, it.process_set
            return reduce.grouped_allreduce(arrays, None, *arguments, names=it.names)
        case "allgather":
            return gather.grouped_allgather(arrays, it.name, it.process_set)
        case "reducescatter":
            return reduce.grouped_reducescatter(arrays, it.name, it.compression, it.op, it.process_set, *it.scales)
        case "broadcast":
            return [broadcasts.broadcast(arrays[0], it.root_rank, it.name, it.process_set)]
    rows, *splits = arrays
    size = it.process_set.size() or 1
    if not splits and rows.ndim and len(rows) % size == 0:  # so that it tells how many rows came from each
        splits = [np.full(size, len(rows) // size, np.int32)]
    return list(gather.alltoall(rows, splits[0] if splits else None, it.name, it.process_set))


def _of_other_rows(tensor: Any) -> tf.TensorSpec:
    """Of a result that has another number of rows than the input; of a 0-d input the collective raises the error."""
    return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else None, tensor.dtype)
