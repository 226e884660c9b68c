"""Nested dicts, lists and tuples of arrays: their leaves in an order that is the same on every rank."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ringreduce.errors import InputError


def leaves(tree: Any, path: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The leaves with their names, such as ("layers.0.w", array); None is not a leaf.

    What is inside itself, as an object's __dict__ may be, is left out there.  within: the ids of what this is in.

    A dict's keys are sorted as strings, so that ranks that filled it in another order agree.

    >>> list(leaves({"b": [1, 2], "a": None}))
    [('b.0', 1), ('b.1', 2)]
    """
    if tree is None or id(tree) in within:
        return
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from leaves(tree[key], _join(path, key), (*within, id(tree)))
    elif isinstance(tree, list | tuple):
        for index, child in enumerate(tree):
            yield from leaves(child, _join(path, index), (*within, id(tree)))
    else:
        yield path, tree


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """All leaves with their names; raises InputError when two have one name, as in {"a.b": x, "a": {"b": y}}."""
    named = list(leaves(tree))
    names = collections.Counter(name for name, _ in named)
    if len(names) < len(named):
        twice = ", ".join(repr(name) for name, count in names.items() if count > 1)
        raise InputError(f"more than one array is called {twice}; rename the keys so that every array has its own name")
    return named


def map_leaves(tree: Any, function: Callable[[str, Any], Any], path: str = "", within: tuple[int, ...] = ()) -> Any:
    """A tree of the same form, its leaves replaced by `function(name, leaf)`; None stays None.

    Raises: InputError for a mapping that does not hold the dict that it is made from, and for what is inside itself.

    >>> map_leaves({"a": [1, None]}, lambda name, leaf: f"{name}={leaf}")
    {'a': ['a.0=1', None]}
    """
    if tree is None:
        return None
    if id(tree) in within:
        raise InputError(f"{path!r} is the {type(tree).__name__} that it is in; pass a tree of arrays")
    inside = (*within, id(tree))
    if isinstance(tree, Mapping):
        return _filled(tree, {key: map_leaves(tree[key], function, _join(path, key), inside) for key in tree})
    if isinstance(tree, list | tuple):
        children = [map_leaves(child, function, _join(path, index), inside) for index, child in enumerate(tree)]
        return type(tree)(*children) if hasattr(tree, "_fields") else type(tree)(children)
    return function(path, tree)


def _filled(tree: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same type that holds `values`, which have the same keys."""
    if isinstance(tree, dict):
        filled: Any = copy.copy(tree)  # keeps a subclass's other attributes, such as a defaultdict's factory
        for key, value in values.items():  # update() of a Counter adds
            filled[key] = value
        return filled
    filled = type(tree)(values)  # type: ignore[call-arg]
    if [(name, id(leaf)) for name, leaf in leaves(filled)] != [(name, id(leaf)) for name, leaf in leaves(values)]:
        kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
        raise InputError(f"a {kind} that is made from a dict does not hold its arrays; pass a dict instead")
    return filled


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
