"""Runs a function of NumPy arrays on TensorFlow's tensors: at once, or as an operation of the graph that is traced.

In a graph it is a py_function. TensorFlow runs those in any order and several at a time, but all that a graph does with
one variable in the order of the program, in its branches and loops too. So each of them takes the same variable: then
all ranks communicate in the order in which they traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from ringreduce.errors import InputError
from ringreduce.execution.signature import called_from, calling_line

OnHost = Callable[[list[Any]], Sequence[Any]]
"""NumPy arrays in, new NumPy arrays or numbers out."""

Function = TypeVar("Function", bound=Callable[..., Any])


def unconverted(function: Function) -> Function:
    """The function as AutoGraph shall leave it where a tf.function of the user's calls it."""
    kept: Function = tf.autograph.experimental.do_not_convert(function)
    return kept


def on_host(what: str, function: OnHost, tensors: Sequence[Any], results: Sequence[tf.TensorSpec]) -> list[Any]:
    """The tensors that `function` makes of `tensors`.

    what:    the name of the public function, for error messages.
    results: their types, and what is known of their shapes before it runs.
    Raises:  InputError where XLA compiles the graph: XLA cannot call Python; and in a graph of TensorFlow 1.
    """
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(each) for each in function([np.asarray(each) for each in tensors])]
    _refuse_graph(what, tf.compat.v1.get_default_graph())
    line = calling_line()

    def operation(_: Any, *tensors: Any) -> list[Any]:
        with called_from(line):
            return [tf.convert_to_tensor(each) for each in function([np.asarray(each) for each in tensors])]

    outputs = tf.py_function(operation, [_order(), *tensors], [each.dtype for each in results])
    outputs = outputs if results else []
    for output, expected in zip(outputs, results, strict=True):
        output.set_shape(expected.shape)
    return list(outputs)


@functools.cache
def _order() -> Any:
    """The variable, as what operations take.

    It is made when a function is traced, perhaps not for the first time: there tf.function forbids a tf.Variable, and
    earlier, at import, TensorFlow would take the GPU before the user has said how.
    """
    with tf.init_scope(), tf.device("CPU"):  # of no graph
        handle = tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name="ringreduce/order")
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
        return handle


def _refuse_graph(what: str, graph: Any) -> None:
    from tensorflow.python.ops import control_flow_util  # there is no public way to ask

    if not graph.building_function:  # there no variable gives operations an order, and each session runs some of them
        raise InputError(
            f"{what}: it was called while a graph of TensorFlow 1 was built (tf.Graph, tf.compat.v1.Session, or after "
            "tf.compat.v1.disable_eager_execution()); call it eagerly or in a tf.function"
        )
    if control_flow_util.GraphOrParentsInXlaContext(graph):
        raise InputError(
            f"{what}: XLA cannot call it inside a function that it compiles; pass jit_compile=False to model.compile "
            "or tf.function (the part without communication may be compiled)"
        )
