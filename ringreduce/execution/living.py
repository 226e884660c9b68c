"""Objects that others own, as long as their owners keep them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Owned = TypeVar("Owned")


class Living(Generic[Owned]):
    """A weakref.WeakSet that can be iterated over while another thread adds to it."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, Owned] = weakref.WeakValueDictionary()

    def add(self, each: Owned) -> None:
        """Keep it in the set until nobody else holds it."""
        self._objects[id(each)] = each

    def __iter__(self) -> Iterator[Owned]:
        for reference in self._objects.valuerefs():  # a list, made at once
            if (each := reference()) is not None:
                yield each
