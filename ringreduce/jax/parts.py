"""What all ranks should have alike, and check=divergence compares: parameters, and what an optimizer keeps.

Inside jit a program passes it to the host in each step: on the CPU its memory, which is read only when a comparison is
due. Nothing of it is in a program that was compiled while the check was off.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringreduce.api.process_sets import ProcessSet
from ringreduce.checks.blame import NUMBER, OWNED, TRAINS
from ringreduce.checks.divergence import compare_parts, compares, part_of
from ringreduce.execution.signature import calling_line
from ringreduce.jax.host import HostCollective, Shape
from ringreduce.jax.primitive import bind, held, in_program

Values = Mapping[str, tuple[Any, int]]  # arrays, or what stands for them, and flags of checks/blame.py, by name


@dataclasses.dataclass(frozen=True)
class Comparison(HostCollective):
    """Compares its arrays; it has no results.

    flags: of each.  gradients: their names.  optimizer: whatever stands for it.
    """

    flags: Sequence[int] = ()
    gradients: Sequence[str] = ()
    optimizer: Any = None

    def shapes(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """None."""
        return []

    def run(self, arrays: Sequence[Any], name: str | None, results: Sequence[Any] | None = None) -> Sequence[Any]:
        """Count a step, and compare if it is time."""
        values = dict(zip(self.names or (), zip(arrays, self.flags, strict=True), strict=True))
        _compare_now(self.optimizer, self.process_set, self.gradients, values)
        return []


def compare(optimizer: Any, process_set: ProcessSet, gradients: Sequence[str], values: Values) -> None:
    """Compare these before gradients of these names are reduced, now or in the program that is being traced."""
    if not in_program():
        _compare_now(optimizer, process_set, gradients, values)
        return
    passed = {name: (_passed(each), flags) for name, (each, flags) in values.items()}
    passed = {name: each for name, each in passed.items() if each[0] is not None}
    comparison = Comparison(
        "check",
        calling_line(),
        "check=divergence",
        names=tuple(passed),
        process_set=process_set,
        flags=tuple(flags for _, flags in passed.values()),
        gradients=tuple(gradients),
        optimizer=optimizer,
    )
    bind(comparison, [each for each, _ in passed.values()])


def _compare_now(optimizer: Any, process_set: ProcessSet, gradients: Sequence[str], values: Values) -> None:
    parts = [part_of(name, functools.partial(np.asarray, each), flags) for name, (each, flags) in values.items()]
    compare_parts(optimizer, process_set, lambda: parts, gradients)


def _passed(value: Any) -> Any:
    """An array that a program can pass to the host, with these values; None where JAX has no such numbers."""
    try:
        return jax.lax.stop_gradient(jnp.asarray(value))
    except (OverflowError, TypeError, ValueError):
        return None


def compare_trees(optimizer: Any, process_set: ProcessSet, gradients: Any, params: Any, state: Any) -> None:
    """As `compare`, of trees, if the check is on."""
    if not compares(optimizer, in_program()):
        return
    values = {name: (each, TRAINS | OWNED) for name, each in _arrays(params)}
    for name, each in _arrays(state):
        values[f"state.{name}"] = each, TRAINS | OWNED if np.ndim(each) else NUMBER
    compare(optimizer, process_set, [name for name, _ in _arrays(gradients)], values)


def _arrays(tree: Any) -> list[tuple[str, Any]]:
    """Those of a tree, and its numbers, by their paths; of random keys their data."""
    found = []
    for path, each in jax.tree_util.tree_flatten_with_path(tree)[0]:
        leaf = held(each)
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if _is_compared(leaf):
            found.append((jax.tree_util.keystr(path, simple=True, separator="."), leaf))
    return found


def _is_compared(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return isinstance(leaf, bool | int | float | complex)
    return bool(jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool)
