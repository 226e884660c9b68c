"""What an elastic state commits of a model or an optimizer of Keras: its variables, by name, and what it trains.

Layers may be frozen and unfrozen, and models compiled anew, between commits: what was committed is made again.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from ringreduce.errors import InputError
from ringreduce.keras.either import finalize, is_layer, is_optimizer, path_of, variables_of

CURE = "commit after you change a model, and build it as it was at the commit when the training function begins"
_OWN = "_clip_gradients", "apply", "register_local_var", "save_assets"
"""Of an optimizer, what DistributedOptimizer has put there."""


class Variables(NamedTuple):
    """Those of a model, a layer or an optimizer."""

    names: list[str]
    arrays: list[Any]
    trainable: list[bool]  # of a model: of its layers, then of its variables
    trained: list[str]  # of an optimizer: the names of what it trains
    kind: str  # of an optimizer: its class


def taken(value: Any, models: Sequence[Any]) -> Variables:
    """What is committed of it.  models: in which an optimizer's variables are, among others."""
    if hasattr(value, "jax_state_sync"):  # during an epoch only Keras' loop over its batches has them
        value.jax_state_sync()
    variables = variables_of(value)
    arrays = [keras.ops.convert_to_numpy(each) for each in variables]
    names = [path_of(each) for each in variables]
    if is_layer(value):
        return Variables(names, arrays, [each.trainable for each in _switches(value)], [], "")
    return Variables(names, arrays, [], _trained(value, models), type(value).__qualname__)


def put_back(value: Any, saved: Variables, models: Sequence[Any]) -> None:
    """Let it be what was committed: train that, and have those values.  models: as for `taken`, restored before.

    Raises: InputError where its variables have other names or shapes; then nothing of it has changed.
    """
    if is_optimizer(value):
        kind = type(value).__qualname__
        if kind != saved.kind:
            raise InputError(f"KerasState: the optimizer is {kind}, but in the last commit {saved.kind}; {CURE}")
        if saved.trained != _trained(value, models):
            _rebuild(value, saved, models)
    pairs = _paired(value, saved)
    if is_layer(value) and saved.trainable != [each.trainable for each in _switches(value)]:
        if len(saved.trainable) != len(_switches(value)):
            raise InputError(f"KerasState: the layers of {value.name!r} differ from those in the last commit; {CURE}")
        for each, trainable in zip(_switches(value), saved.trainable, strict=True):
            each.trainable = trainable
        _recompile([value])
    for variable, array in pairs:
        variable.assign(np.array(array))  # a copy, as JAX keeps such memory for its own
    if is_layer(value):
        finalize(value)


def _trained(optimizer: Any, models: Sequence[Any]) -> list[str]:
    """The names of what it trains; of Keras 2, which does not keep them, none: it has its own variables for these."""
    known = {id(each): name for name, each in _named(models)}
    return [known.get(id(each), path_of(each)) for each in getattr(optimizer, "_trainable_variables", ())]


def _switches(layer: Any) -> list[Any]:
    """What can be frozen: layers, each before those that are in it, then variables, those of Keras 3."""
    return [*layer._flatten_layers(), *(each for each in layer.variables if isinstance(each, keras.Variable))]


def _named(models: Iterable[Any]) -> list[tuple[str, Any]]:
    named = [(f"{number}.{path_of(each)}", each) for number, model in enumerate(models) for each in model.variables]
    return list(zip(_numbered([name for name, _ in named]), [each for _, each in named], strict=True))


def _numbered(paths: Iterable[str]) -> list[str]:
    """Names of which none comes twice, without the numbers of layers: a rank may have made others before."""
    counts = collections.Counter[str]()
    names = []
    for path in paths:
        name = re.sub("_[0-9]+", "", path)
        counts[name] += 1
        names.append(f"{name} ({counts[name]})")
    return names


def _paired(value: Any, saved: Variables) -> list[tuple[Any, Any]]:
    """Each variable with its committed array."""
    variables = variables_of(value)
    names, others = [path_of(each) for each in variables], saved.names
    if len(set(names)) < len(names) or sorted(names) != sorted(others):
        names, others = _numbered(names), _numbered(others)
    committed = dict(zip(others, saved.arrays, strict=True))
    what = "optimizer" if is_optimizer(value) else "model"
    shapes = {name: tuple(each.shape) for name, each in zip(names, variables, strict=True)}
    for name in (*others, *names):
        now, then = shapes.get(name), committed[name].shape if name in committed else None
        if now != then:
            raise InputError(
                f"KerasState: the {what}'s variable {name.removesuffix(' (1)')!r} has the shape {_text(now)}, "
                f"but in the last commit {_text(then)}; {CURE}"
            )
    return [(variable, committed[name]) for variable, name in zip(variables, names, strict=True)]


def _text(shape: tuple[int, ...] | None) -> str:
    return "none: it is not there" if shape is None else str(shape)


def _rebuild(optimizer: Any, saved: Variables, models: Sequence[Any]) -> None:
    """Let an optimizer train what it trained when it was committed, without the variables that it has had since."""
    known = dict(_named(models))
    for each in saved.trained:
        if each not in known:
            raise InputError(f"KerasState: the last commit trains {each!r}, which no model has; {CURE}")
    variables = [known[each] for each in saved.trained]
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    anew = type(inner).from_config(inner.get_config())
    anew.build(variables)
    own = {name: vars(inner)[name] for name in _OWN if name in vars(inner)}
    vars(inner).clear()
    vars(inner).update(vars(anew), **own)  # not by setattr: Keras and TensorFlow would keep track of it
    if inner is not optimizer:
        for name in ("_trainable_variables", "_trainable_variables_indices"):
            vars(optimizer)[name] = vars(inner)[name]
    _recompile(models)


def _recompile(models: Iterable[Any]) -> None:
    """The next fit makes its step anew."""
    for each in models:
        if hasattr(each, "train_function"):
            each.train_function = None
