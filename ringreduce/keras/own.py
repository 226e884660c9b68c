"""Variables that are one rank's own: an optimizer does not reduce their gradients, and other ranks may lack them."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from ringreduce.api.process_sets import ProcessSet
from ringreduce.errors import InputError
from ringreduce.keras.either import is_layer


def local_variables(function: str, layers: Any) -> list[Any]:
    """The trainable variables of a layer, or of several; None: of none."""
    several = layers if isinstance(layers, Iterable) else [] if layers is None else [layers]
    found: list[Any] = []
    for layer in several:
        if not is_layer(layer):
            raise InputError(f"{function}: local_layers has {layer!r}; expected layers of Keras")
        if not layer.built:
            raise InputError(
                f"{function}: layer {layer.name!r} of local_layers is not built, so it has no variables yet"
            )
        found += layer.trainable_variables
    return found


class OwnVariables:
    """Those of one optimizer, or of one tape.

    process_set: the ranks that reduce the others' gradients.
    scales:      divide the gradients of these by the number of ranks: they are then those of the averaged loss.
    """

    def __init__(self, process_set: ProcessSet, scales: bool = True) -> None:
        self._process_set, self._scales = process_set, scales
        self._variables: dict[int, Any] = {}  # those of TensorFlow have no hash

    def __bool__(self) -> bool:
        return bool(self._variables)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._variables.values())

    def __contains__(self, variable: Any) -> bool:
        return identity(variable) in self._variables

    def add(self, variable: Any) -> None:
        """Let it be one of them."""
        self._variables[identity(variable)] = variable

    def slots(self, variables: Iterable[Any]) -> set[int]:
        """The ids of an optimizer's variables, of these, that Keras has made for one of the own, as its momentum."""
        own = self._variables.values()
        prefixes = tuple(f"{each.path.replace('/', '_')}_" for each in own if hasattr(each, "path"))
        of_keras_2 = [_parts(each) for each in own if not hasattr(each, "path")]
        return {
            id(each)
            for each in variables
            if each.name.startswith(prefixes)
            or (not each.trainable and any(name in _parts(each) for name in of_keras_2))
        }

    def gradient(self, gradient: Any, factor: float = 1.0) -> Any:
        """The gradient of one of them, times a number."""
        if gradient is None:
            return None
        if type(gradient).__module__.startswith("tensorflow."):
            operations = importlib.import_module("ringreduce.tensorflow.ops")  # it may be IndexedSlices
            gradient = operations.averaged(gradient, self._process_set) if self._scales else gradient
            return gradient if factor == 1 else operations.scaled(gradient, factor)
        factor /= (self._process_set.size() or 1) if self._scales else 1
        return gradient if factor == 1 else gradient * factor


def _parts(variable: Any) -> str:
    """The name of a variable of Keras 2, in which that of a slot, such as `Adam/m/dense/kernel:0`, has another's."""
    return f"/{variable.name.partition(':')[0]}/"


def identity(variable: Any) -> int:
    """In TensorFlow a Keras variable and its tf.Variable are one."""
    return id(getattr(variable, "handle", variable))
