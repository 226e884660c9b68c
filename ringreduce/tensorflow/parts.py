"""What all ranks should have alike, and check=divergence compares; a graph passes it to the host in each step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringreduce.api.process_sets import ProcessSet
from ringreduce.checks.blame import OWNED, TRAINS
from ringreduce.checks.divergence import compare_from_second_step, compare_parts, compares, numbered, part_of
from ringreduce.tensorflow.host import on_host

Values = Mapping[str, tuple[Any, int]]  # tensors or variables, and flags of checks/blame.py, by name


class _Tapes:
    """Stands for all tapes that reduce the gradients of the same variables: each step has another one."""


def in_program() -> bool:
    """Whether TensorFlow traces."""
    return not tf.executing_eagerly()


def compare(optimizer: Any, process_set: ProcessSet, gradients: Sequence[str], values: Values) -> None:
    """Compare these before gradients of these names are reduced, now or in the graph that is being traced."""

    def run(arrays: Sequence[Any]) -> list[Any]:
        found = zip(values, arrays, [flags for _, flags in values.values()], strict=True)
        parts = [part_of(name, functools.partial(np.asarray, each), flags) for name, each, flags in found]
        compare_parts(optimizer, process_set, lambda: parts, gradients)
        return []

    on_host("check", run, [tf.convert_to_tensor(each) for each, _ in values.values()], [])


def compare_sources(process_set: ProcessSet, sources: Sequence[Any]) -> None:
    """Compare the variables among these, whose gradients a tape reduces, if the check is on."""
    own = [each for each in sources if hasattr(each, "assign")]
    if not own:
        return
    names = tuple(numbered(at, getattr(each, "path", each.name)) for at, each in enumerate(own))
    kept = vars(own[0]).setdefault("_ringreduce_tapes", {})  # variables have no hash
    tapes = kept.setdefault((names, process_set), _Tapes())
    compare_from_second_step(tapes)
    if compares(tapes, in_program()):
        values = {name: (each, TRAINS | OWNED) for name, each in zip(names, own, strict=True)}
        compare(tapes, process_set, names, values)
