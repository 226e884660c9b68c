"""The collectives on TensorFlow's tensors, by Horovod's names.

Each works eagerly and inside tf.function, and has a gradient, whose scale is Horovod's: for allgather and broadcast
that of a loss averaged over the ranks, and for a reduction the same reduction again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.api import broadcast as broadcasts
from ringreduce.api import control, gather, reduce
from ringreduce.api.process_sets import ProcessSet, global_process_set
from ringreduce.api.submit import which_op
from ringreduce.api.world import rank
from ringreduce.compression import Compression, Compressor
from ringreduce.errors import InputError
from ringreduce.ops import Average, ReduceOp, Sum
from ringreduce.tensorflow.host import OnHost, on_host, unconverted

__all__ = ["allgather", "allreduce", "alltoall", "barrier", "broadcast", "grouped_allgather", "grouped_allreduce"]
__all__ += ["grouped_reducescatter", "reducescatter"]


@unconverted
def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over all ranks; the same bits on every rank.

    tensor:   any tensor or variable, equal in shape and type on all ranks; or IndexedSlices, whose rows are gathered
              from all ranks, for Average divided by their number: the result has a row several times.
    Gradient: for Average and Sum the same allreduce, compressed too; for other ops InputError.
    Raises:   as `ringreduce.allreduce`. Inside tf.function what ranks find out together is an error of TensorFlow's
              with that text.
    Source:   Horovod's allreduce.
    """
    scales = prescale_factor, postscale_factor
    return grouped_allreduce([tensor], average, name, compression, op, *scales, process_set)[0]


@unconverted
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    names: Sequence[str] | None = None,
) -> list[Any]:
    """Reduce many tensors, all or none of them; otherwise as `allreduce`.

    names: of the tensors, for error messages.
    """
    op = which_op("allreduce", average, op)
    sparse = [number for number, each in enumerate(tensors) if isinstance(each, tf.IndexedSlices)]
    dense = [number for number in range(len(tensors)) if number not in set(sparse)]
    of_dense = names if names is None else [names[number] for number in dense]

    def forward(arrays: list[Any]) -> list[Any]:
        scales = prescale_factor, postscale_factor
        return reduce.grouped_allreduce(arrays, None, name, compression, op, *scales, process_set, names=of_dense)

    def gradient(gradients: list[Any], _: list[Any]) -> list[Any]:
        if op not in (Average, Sum):
            raise InputError(f"allreduce: op={op!r} has no gradient; expected Average or Sum, or tf.stop_gradient")
        own, scales = _gradients_name(name), (prescale_factor, postscale_factor)
        return grouped_allreduce(gradients, None, own, compression, op, *scales, process_set, names=of_dense)

    inputs = [tf.convert_to_tensor(tensors[number]) for number in dense]
    reduced = _collective("allreduce", forward, gradient, inputs, inputs)
    results = list(tensors)
    for number, result in zip(dense, reduced, strict=True):
        results[number] = result
    for number in sparse:
        own = None if name is None else f"{name}.{number}"
        results[number] = _gathered_slices(tensors[number], own, op, prescale_factor * postscale_factor, process_set)
    return results


def _gathered_slices(slices: Any, name: str | None, op: ReduceOp, scale: float, process_set: ProcessSet) -> Any:
    if op not in (Average, Sum):
        raise InputError(f"allreduce: op={op!r} of IndexedSlices; expected Average or Sum, or tf.convert_to_tensor")
    values, indices = grouped_allgather([slices.values, slices.indices], name, process_set)
    scale /= (process_set.size() or 1) if op is Average else 1
    values = values if scale == 1 else values * tf.cast(scale, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


@unconverted
def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate the tensors of all ranks along dim 0, in rank order; how many rows each has may differ.

    Gradient: this rank's rows of the result's gradient, averaged over the ranks.
    Otherwise as `ringreduce.allgather`.  Source: Horovod's allgather.
    """
    return grouped_allgather([tensor], name, process_set)[0]


@unconverted
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gather many tensors, all or none of them; otherwise as `allgather`."""

    def forward(arrays: list[Any]) -> list[Any]:
        return gather.grouped_allgather(arrays, name, process_set)

    def gradient(gradients: list[Any], _: list[Any]) -> list[Any]:
        own = _gradients_name(name)
        averages = grouped_allreduce(gradients, None, own, op=Average, process_set=process_set)
        rows = tf.stack([tf.shape(each)[0] for each in inputs])
        everyones = allgather(rows[None], own and f"{own}.rows", process_set)
        starts = tf.reduce_sum(everyones[: process_set.rank()], 0)
        return [each[starts[at] : starts[at] + rows[at]] for at, each in enumerate(averages)]

    inputs = [tf.convert_to_tensor(each) for each in tensors]
    return _collective("allgather", forward, gradient, inputs, map(_of_other_rows, inputs))


@unconverted
def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The root's tensor on every rank; otherwise as `ringreduce.broadcast`.

    Gradient: on the root the result's, averaged over the ranks; elsewhere zeros.
    Source:   Horovod's broadcast.
    """

    def forward(arrays: list[Any]) -> list[Any]:
        return [broadcasts.broadcast(arrays[0], root_rank, name, process_set)]

    def gradient(gradients: list[Any], _: list[Any]) -> list[Any]:
        average = allreduce(gradients[0], None, _gradients_name(name), op=Average, process_set=process_set)
        return [average if rank() == root_rank else tf.zeros_like(average)]

    value = tf.convert_to_tensor(tensor)
    return _collective("broadcast", forward, gradient, [value], [value])[0]


@unconverted
def alltoall(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send each rank its part of the rows, and return what all ranks sent to this one, in rank order.

    splits:   the rows for each rank, (size,), and the result is (rows, received_splits). None: equal parts.
    Gradient: sent back to where the rows came from.
    Source:   Horovod's alltoall.
    """

    def forward(arrays: list[Any]) -> list[Any]:
        rows, given = arrays
        if splits is None:
            received = np.full(size, len(rows) // size if rows.ndim else 0)
            return [gather.alltoall(rows, None, name, process_set), received.astype(np.int32)]
        return list(gather.alltoall(rows, given, name, process_set))

    def gradient(gradients: list[Any], results: list[Any]) -> list[Any]:
        back, _ = alltoall(gradients[0], results[1], _gradients_name(name), process_set)
        unsent = tf.shape(value)[0] - tf.shape(back)[0]
        return [tf.concat([back, tf.zeros_like(value[:unsent])], 0), None]

    size = process_set.size() or 1
    value, parts = tf.convert_to_tensor(tensor), tf.cast([] if splits is None else splits, tf.int32)
    specs = [_of_other_rows(value), tf.TensorSpec([size], tf.int32)]
    rows, received = _collective("alltoall", forward, gradient, [value, parts], specs)
    return rows if splits is None else (rows, received)


@unconverted
def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over all ranks; returns this rank's part of the rows.

    Gradient: an allgather of the parts' gradients, times both factors, and for Sum times the number of ranks.
    Otherwise as `ringreduce.reducescatter`.  Source: Horovod's reducescatter.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


@unconverted
def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce and scatter many tensors, all or none of them; otherwise as `reducescatter`."""

    def forward(arrays: list[Any]) -> list[Any]:
        scales = prescale_factor, postscale_factor
        return reduce.grouped_reducescatter(arrays, name, compression, op, process_set, *scales)

    def gradient(gradients: list[Any], _: list[Any]) -> list[Any]:
        factor = prescale_factor * postscale_factor * ((process_set.size() or 1) if op is Sum else 1)
        scaled = [each * tf.cast(factor, each.dtype) for each in gradients]
        return grouped_allgather(scaled, _gradients_name(name), process_set)

    inputs = [tf.convert_to_tensor(each) for each in tensors]
    return _collective("reducescatter", forward, gradient, inputs, map(_of_other_rows, inputs))


@unconverted
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it; inside tf.function it has its place in the order of the collectives."""

    def forward(_: list[Any]) -> list[Any]:
        control.barrier(process_set)
        return []

    on_host("barrier", forward, [], [])


Gradient = Callable[[list[Any], list[Any]], Sequence[Any]]
"""Makes the gradients of the inputs from those of the results, and the results."""


def _collective(
    what: str, forward: OnHost, gradient: Gradient, inputs: Sequence[Any], results: Iterable[Any]
) -> list[Any]:
    """The results of a collective, with its gradient.  results: tensors or specs with their types and known shapes."""
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in results]
    if not inputs:
        return []

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def call(*inputs: Any) -> Any:
        outputs = on_host(what, forward, inputs, specs)
        return outputs, lambda *gradients: gradient([tf.convert_to_tensor(each) for each in gradients], outputs)

    return list(call(*inputs))


def _of_other_rows(tensor: Any) -> tf.TensorSpec:
    """Of a result that has another number of rows than the input; of a 0-d input the collective raises the error."""
    return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else None, tensor.dtype)


def _gradients_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"
