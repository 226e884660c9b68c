"""Keras 3, and Keras 2, which is tf_keras: what is one's or the other's, and what they call by other names.

TensorFlow's `tf.keras` is Keras 3, or tf_keras where TF_USE_LEGACY_KERAS=1; a program may use both. Nobody asks which
of them is meant: an optimizer, a model or a list of callbacks is one's or the other's.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any

import keras

REDUCES = "_clip_gradients", "aggregate_gradients", "_aggregate_gradients"
"""In place of which DistributedOptimizer puts what reduces, in optimizers of Keras 3, Keras 2 and its `legacy`."""


def of_either(*names: str) -> tuple[type, ...]:
    """The classes of these names, such as "layers.Layer", of Keras 3, and of tf_keras where that is imported."""
    libraries = [keras] if sys.modules.get("tf_keras") is None else [keras, sys.modules["tf_keras"]]
    return tuple(operator.attrgetter(name)(each) for each in libraries for name in names)


def is_keras_3(library: Any) -> bool:
    """Whether a library, such as TensorFlow's `tf.keras`, is Keras 3."""
    try:
        return issubclass(library.layers.Layer, keras.layers.Layer)
    except ImportError:  # it should be tf_keras, which is not there, and TensorFlow has warned of it
        return True


def is_layer(value: Any) -> bool:
    """Whether it is a layer, or a model."""
    return isinstance(value, of_either("layers.Layer"))


def is_optimizer(value: Any) -> bool:
    """Whether it is an optimizer."""
    return isinstance(value, keras.optimizers.Optimizer) or is_of_keras_2(value)


def is_of_keras_2(optimizer: Any) -> bool:
    """Whether it is an optimizer of tf_keras, a `legacy` one too: those of Keras until 2.10."""
    library = sys.modules.get("tf_keras")
    kinds = library and (library.optimizers.Optimizer, library.optimizers.legacy.Optimizer)
    return isinstance(optimizer, kinds or ())


def is_legacy(optimizer: Any) -> bool:
    """Whether it is one of tf_keras's `legacy`."""
    return hasattr(optimizer, "_create_all_weights")


def inner_of(optimizer: Any) -> Any:
    """The optimizer itself, or that of a LossScaleOptimizer."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def reduction_of(optimizer: Any) -> Any:
    """What reduces in a DistributedOptimizer; None in another one."""
    found = (vars(inner_of(optimizer)).get(name) for name in REDUCES)
    return next((each for each in found if hasattr(each, "process_set")), None)


def path_of(variable: Any) -> str:
    """The name of a variable, with those of what it is in."""
    path: str = getattr(variable, "path", None) or variable.name
    return path


def variables_of(value: Any) -> list[Any]:
    """Those of a model, a layer or an optimizer; one of Keras 2 does not count its learning rate and the like."""
    found = list(value.variables() if callable(value.variables) else value.variables)
    if is_of_keras_2(value):
        inner = vars(inner_of(value))
        settings = {"rate": inner.get("_learning_rate"), **inner.get("_hyper", {})}
        found += [each for _, each in sorted(settings.items()) if hasattr(each, "assign")]
        found += getattr(inner.get("apply_gradients"), "variables", ())
    return found


def built(optimizer: Any, variables: Sequence[Any]) -> Any:
    """The optimizer, with the variables that it needs for these."""
    if is_legacy(optimizer):
        with sys.modules["tensorflow"].name_scope(optimizer._name):  # as in its apply_gradients
            optimizer._create_all_weights(variables)
    elif not getattr(optimizer, "built", False):
        optimizer.build(variables)
    if accumulates := getattr(vars(inner_of(optimizer)).get("apply_gradients"), "build", None):
        accumulates(variables)
    return optimizer


def finalize(layer: Any) -> None:
    """Let all layers in it make anew what they keep of their weights, as Keras does where it loads some: Normalization.

    Not of layers without weights, such as Discretization, whose state may be gone.
    """
    for each in layer._flatten_layers():
        if hasattr(each, "finalize_state") and each.weights:
            each.finalize_state()


def rate_of(optimizer: Any) -> float:
    """The learning rate; a `legacy` optimizer may have a schedule in its place."""
    rate = optimizer.learning_rate
    return float(keras.ops.convert_to_numpy(rate(optimizer.iterations) if callable(rate) else rate))


class CalledByEither:
    """A callback of Keras 3 that the `fit` of Keras 2 calls, too: it asks which batches a callback is called in."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    _implements_test_batch_hooks = _implements_predict_batch_hooks = _implements_train_batch_hooks
