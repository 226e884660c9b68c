"""Optimizers of Keras 2, which is tf_keras: `tf.keras.optimizers` where TF_USE_LEGACY_KERAS=1, and `legacy` ones.

An optimizer stays the object that it is. Gradients are reduced where Keras 2 adds up those of a tf.distribute strategy:
after they were unscaled, before a LossScaleOptimizer looks whether all are finite, and before they are clipped and
applied, in every way to train.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from ringreduce.keras.either import REDUCES, built
from ringreduce.keras.optimizer import operation_name
from ringreduce.keras.own import OwnVariables, identity
from ringreduce.optim.exchange import Exchange
from ringreduce.tensorflow.host import unconverted
from ringreduce.tensorflow.tape import Reduction


def reduce_in(
    optimizer: Any,
    exchange: Exchange,
    own: OwnVariables,
    sparse_as_dense: bool,
    name: str | None,
    passes: int,
    average: bool,
) -> None:
    """Let an optimizer reduce its gradients; the arguments are those of DistributedOptimizer."""
    method = next(each for each in REDUCES[1:] if hasattr(optimizer, each))
    own_attributes = vars(optimizer)  # not by setattr: Keras and TensorFlow would keep track of it
    own_attributes[method] = _Aggregation(getattr(optimizer, method), Reduction(exchange, own, sparse_as_dense), name)
    if passes > 1:
        own_attributes["apply_gradients"] = _Accumulation(optimizer, passes, average)


class _Aggregation:
    """Stands for the `aggregate_gradients` of one optimizer."""

    def __init__(self, of_keras: Any, reduction: Reduction, name: str | None) -> None:
        self._of_keras, self._reduction, self._name = of_keras, reduction, name
        self.process_set, self.own = reduction.process_set, reduction.own

    @unconverted
    def __call__(self, grads_and_vars: Iterable[Any]) -> list[Any]:
        """The pairs, their gradients reduced."""
        pairs = [each for each in self._of_keras(grads_and_vars) if each[0] is not None]
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        name = self._name or operation_name([each for each in variables if each not in self.own])
        return list(zip(self._reduction(gradients, variables, name), variables, strict=True))


class _Accumulation:
    """Stands for the `apply_gradients` of one optimizer: it applies the sum, or mean, of so many passes' gradients.

    A LossScaleOptimizer passes it gradients that are reduced, each time, as it asks whether they are finite.
    """

    def __init__(self, optimizer: Any, passes: int, average: bool) -> None:
        self._optimizer, self._passes, self._factor = optimizer, passes, 1 / passes if average else 1
        self._passed = tf.Variable(0, name="passes", trainable=False)
        self._sums: dict[int, Any] = {}  # by variables

    @property
    def variables(self) -> list[Any]:
        """How many passes there were, and their sums."""
        return [self._passed, *self._sums.values()]

    def build(self, variables: Sequence[Any]) -> None:
        """Make what holds their gradients."""
        for each in variables:
            if identity(each) not in self._sums:
                name = f"accumulated/{each.name.partition(':')[0]}"
                self._sums[identity(each)] = tf.Variable(tf.zeros(each.shape, each.dtype), trainable=False, name=name)

    @unconverted
    def __call__(self, grads_and_vars: Iterable[Any], *args: Any, **options: Any) -> Any:
        """Apply them, if it is time."""
        pairs = [each for each in grads_and_vars if each[0] is not None]
        variables = [variable for _, variable in pairs]
        with tf.init_scope():
            built(self._optimizer, variables)
        sums = [self._sums[identity(each)] for each in variables]
        self._passed.assign_add(1)
        for each, (gradient, _) in zip(sums, pairs, strict=True):
            each.assign_add(tf.convert_to_tensor(gradient))

        def step() -> Any:
            self._passed.assign(0)
            scaled = [each * self._factor for each in sums]
            for each in sums:
                each.assign(tf.zeros_like(each))
            type(self._optimizer).apply_gradients(
                self._optimizer, zip(scaled, variables, strict=True), *args, **options
            )
            return True

        tf.cond(self._passed >= self._passes, step, lambda: False)
        return self._optimizer.iterations
