"""Optimizers of Keras 2, which is tf_keras: `tf.keras.optimizers` where TF_USE_LEGACY_KERAS=1, and `legacy` ones.

An optimizer stays the object that it is. Gradients are reduced where Keras 2 adds up those of a tf.distribute strategy:
after they were unscaled, before a LossScaleOptimizer looks whether all are finite, and before they are clipped and
applied, in every way to train. Where several passes make a step, each rank adds up its own until then; a
LossScaleOptimizer then gets gradients that are not reduced, but are finite on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.collectives.ops import Min
from ringreduce.keras import saved
from ringreduce.keras.either import REDUCES, built, is_legacy
from ringreduce.keras.loading import read_options
from ringreduce.keras.optimizer import operation_name
from ringreduce.keras.own import OwnVariables, identity
from ringreduce.optim.exchange import Exchange
from ringreduce.tensorflow.host import unconverted
from ringreduce.tensorflow.ops import allreduce, scaled
from ringreduce.tensorflow.tape import Reduction


def reduce_in(
    optimizer: Any,
    exchange: Exchange,
    own: OwnVariables,
    sparse_as_dense: bool,
    name: str | None,
    passes: int,
    average: bool,
    kept: dict[str, Any],
) -> None:
    """Let an optimizer reduce its gradients; the arguments are those of DistributedOptimizer, and what files keep."""
    method = next(each for each in REDUCES[1:] if hasattr(optimizer, each))
    reduction = _Aggregation(optimizer, method, Reduction(exchange, own, sparse_as_dense), name, kept, passes > 1)
    own_attributes = vars(optimizer)  # not by setattr: Keras and TensorFlow would keep track of it
    own_attributes.pop(REDUCES[0], None)  # of one that was loaded
    own_attributes |= {method: reduction, "save_assets": reduction.save}
    if passes > 1:
        own_attributes["apply_gradients"] = _Accumulation(optimizer, reduction, passes, average)
    read_options()


class _Aggregation:
    """Stands for the `aggregate_gradients` of one optimizer.

    accumulates: the optimizer has an `_Accumulation`, and only a LossScaleOptimizer calls this, in each pass.
    """

    def __init__(
        self,
        optimizer: Any,
        method: str,
        reduction: Reduction,
        name: str | None,
        kept: dict[str, Any],
        accumulates: bool,
    ) -> None:
        self._optimizer, self._of_keras = optimizer, getattr(optimizer, method)
        self._reduction, self._name, self._kept = reduction, name, kept
        self._accumulates, self.is_asked = accumulates, False
        self.process_set, self.own = reduction.process_set, reduction.own

    @unconverted
    def __call__(self, grads_and_vars: Iterable[Any]) -> list[Any]:
        """The pairs, their gradients reduced, or until they are accumulated finite on all ranks alike."""
        pairs = [each for each in self._of_keras(grads_and_vars) if each[0] is not None]
        self.is_asked = self._accumulates
        return self._alike(pairs) if self._accumulates else self.reduced(pairs)

    def reduced(self, pairs: Iterable[Any]) -> list[Any]:
        """The pairs, their gradients reduced."""
        gradients, variables = map(list, zip(*pairs, strict=True))
        return list(zip(self._reduction(gradients, variables, self._operation(variables)), variables, strict=True))

    def _alike(self, pairs: Sequence[Any]) -> list[Any]:
        """The pairs; where a gradient is not finite on one rank, none is on any: all skip the pass."""
        if not self.process_set.included():
            return list(pairs)
        values = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient, _ in pairs]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in values])
        name = f"{self._operation([variable for _, variable in pairs])}.finite"
        everywhere = allreduce(tf.cast(finite, tf.int32), name=name, op=Min, process_set=self.process_set)
        factor = tf.where(everywhere == 1, 1.0, np.nan)
        return [(scaled(gradient, factor), variable) for gradient, variable in pairs]

    def _operation(self, variables: Iterable[Any]) -> str:
        return self._name or operation_name([each for each in variables if each not in self.own])

    def save(self, folder: str) -> None:
        """Keep the options there, and which variables are a rank's own, by their places; see keras/saved.py."""
        places = getattr(self._optimizer, "_index_dict", {})  # by what is one variable's own
        saved.write(self._kept, folder, sorted(places[each._unique_id] for each in self.own if places))


class _Accumulation:
    """Stands for the `apply_gradients` of one optimizer: it applies the sum, or mean, of so many passes' gradients."""

    def __init__(self, optimizer: Any, reduction: _Aggregation, passes: int, average: bool) -> None:
        self._optimizer, self._passes, self._factor = optimizer, passes, 1 / passes if average else 1
        self._reduction = reduction
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
        of_keras_2 = options.pop("skip_gradients_aggregation", False)
        of_legacy = not options.pop("experimental_aggregate_gradients", True)
        reduces = self._reduction.is_asked or not (of_keras_2 or of_legacy)
        self._reduction.is_asked = False

        def step() -> Any:
            self._passed.assign(0)
            due = [(each * self._factor, variable) for each, variable in zip(sums, variables, strict=True)]
            for each in sums:
                each.assign(tf.zeros_like(each))
            due = self._reduction.reduced(due) if reduces else due
            apply = type(self._optimizer).apply_gradients
            apply(self._optimizer, due, *args, **options, experimental_aggregate_gradients=False)
            return True

        done = tf.cond(self._passed >= self._passes, step, lambda: False)
        return tf.group(done) if is_legacy(self._optimizer) else self._optimizer.iterations  # what Keras' own return
