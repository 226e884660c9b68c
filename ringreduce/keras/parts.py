"""What all ranks should have alike, and check=divergence compares: an optimizer's variables, and those of a model."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import keras

from ringreduce.api.process_sets import ProcessSet
from ringreduce.checks.blame import BUFFER, NUMBER, OWNED, TRAINS
from ringreduce.checks.divergence import compare_from_second_step, compare_parts, compares, numbered, part_of
from ringreduce.keras.either import path_of
from ringreduce.keras.own import OwnVariables


def compare(optimizer: Any, process_set: ProcessSet, names: Sequence[str], own: OwnVariables) -> None:
    """Compare what an optimizer of Keras has before gradients of these names are reduced, if the check is on.

    own: not these, which are this rank's own, nor what the optimizer keeps of them.
    """
    backend = keras.backend.backend()
    adapter = None if backend == "torch" else importlib.import_module(f"ringreduce.{backend}.parts")
    if not compares(optimizer, adapter is not None and adapter.in_program()):
        return
    compare_from_second_step(optimizer)
    left_out = {id(each) for each in getattr(optimizer, "_accumulated_gradients", None) or ()}  # each rank's own
    left_out |= own.slots(optimizer.variables)
    shared = [each for each in optimizer._trainable_variables if each not in own]
    values = {name: (each, TRAINS | OWNED) for name, each in named(shared)}
    for name, each in named([each for each in optimizer.variables if id(each) not in left_out]):
        values[f"optimizer.{name}"] = each, TRAINS | OWNED if len(each.shape) else NUMBER
    if adapter is not None:
        tensors = {name: (each.value, flags) for name, (each, flags) in values.items()}
        adapter.compare(optimizer, process_set, names, tensors)
    else:
        parts = [part_of(name, functools.partial(_numpy, each), flags) for name, (each, flags) in values.items()]
        compare_parts(optimizer, process_set, lambda: parts, names)


def compare_buffers(model: Any, process_set: ProcessSet, steps_each: int) -> None:
    """Compare what a model has and does not train, but not the states of random seeds: those should differ."""
    variables = model.non_trainable_weights if model.built else ()  # of which Keras 2 raises an error
    parts = [part_of(name, functools.partial(_numpy, each), BUFFER) for name, each in named(variables)]
    compare_parts(model, process_set, lambda: parts, ["buffers"], steps_each)


def named(variables: Sequence[Any]) -> list[tuple[str, Any]]:
    """With names."""
    return [(numbered(number, path_of(each)), each) for number, each in enumerate(variables)]


def _numpy(variable: Any) -> Any:
    return keras.ops.convert_to_numpy(variable)
