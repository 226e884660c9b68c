"""Objects that others own, for as long as these keep them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

Owned = TypeVar("Owned")


class Living(Generic[Owned]):
    """As weakref.WeakSet, which cannot be iterated over while another thread adds to it."""

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, Owned] = weakref.WeakValueDictionary()

    def add(self, each: Owned) -> None:
        """Have it among them until nobody else has it."""
        self._objects[id(each)] = each

    def __iter__(self) -> Iterator[Owned]:
        for reference in self._objects.valuerefs():  # a list, made at once
            if (each := reference()) is not None:
                yield each
