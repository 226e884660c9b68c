"""Where arrays lie, and which of them have memory in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np


class Memory(NamedTuple):
    """That of a dense array."""

    device: str
    address: int
    nbytes: int
    name: str

    @classmethod
    def of(cls, name: str, array: Any) -> Memory:
        """That of an array of NumPy or CuPy."""
        on_host = isinstance(array, np.ndarray)
        device, address = ("cpu", array.ctypes.data) if on_host else (str(array.device), array.data.ptr)
        return cls(device, address, array.nbytes, name)


def overlapping(memory: Iterable[Memory]) -> tuple[Memory, Memory] | None:
    """Two that have memory in common, in the order of their addresses; None where all lie apart."""
    in_order = sorted(each for each in memory if each.nbytes)
    for one, other in itertools.pairwise(in_order):  # where any overlap, two neighbours do
        if one.device == other.device and other.address < one.address + one.nbytes:
            return one, other
    return None


def in_common(memory: Iterable[Memory]) -> str:
    """Such as "'a' and 'b' have the same memory"; empty where all lie apart."""
    if (found := overlapping(memory)) is None:
        return ""
    one, other = found
    is_one = (one.address, one.nbytes) == (other.address, other.nbytes)
    return f"{one.name!r} and {other.name!r} have {'the same memory' if is_one else 'memory in common'}"
