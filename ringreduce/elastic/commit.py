"""One copy of a state: everything pickled but its arrays, whose bytes stand in one piece of memory."""

from __future__ import annotations

import collections
import copy
import io
import pickle
from typing import Any

import cloudpickle
import numpy as np

from ringreduce.elastic.libraries import LIBRARIES, library_of, nbytes_of

ALIGNMENT = 64
REFERENCE = ""  # stands for the library of an array that is referred to
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes)


class Commit:
    """A copy of a tree of objects and arrays, in memory that the next copy uses again.

    number: how many commits there have been; the same state on all ranks has the same number. 0: before the first sync.
    """

    def __init__(self) -> None:
        self.number = 0
        self.pickled = b""
        self.memory = np.empty(0, np.uint8)
        self.references: list[Any] = []  # arrays that cannot change, and so are not copied
        self._rooms: dict[Any, Any] = {}

    def take(self, tree: Any, number: int, refers: bool = False) -> None:
        """Copy `tree`.  Cost: copies its arrays once, and pickles what else there is.

        refers: keep JAX's arrays without copying them; such a commit cannot be sent.
        """
        file = io.BytesIO()
        pickler = _Pickler(file, refers)
        pickler.dump(tree)
        self.reserve(pickler.nbytes)
        for name, found in pickler.arrays.items():
            rooms = [self._room(name, *where) for where, _ in found]
            LIBRARIES[name].keep(rooms, [array for _, array in found])
        self.number, self.pickled, self.references = number, file.getvalue(), pickler.references

    def reserve(self, nbytes: int) -> None:
        """Have memory for so many bytes."""
        if self.memory.nbytes != nbytes:
            self._rooms.clear()
            self.memory = np.empty(nbytes, np.uint8)

    def tree(self) -> Any:
        """The tree; its arrays may lie in this commit's memory: see `put_back`."""
        unpickler = pickle.Unpickler(io.BytesIO(self.pickled))  # noqa: S301 - pickled by a rank of this job
        unpickler.persistent_load = self._load  # type: ignore[method-assign]
        return unpickler.load()

    def _load(self, identity: Any) -> Any:
        name, *where = identity
        if name == REFERENCE:
            return self.references[where[0]]
        return LIBRARIES[name].array(self._room(name, *where))

    def _room(self, name: str, start: int, dtype: Any, shape: tuple[int, ...], nbytes: int) -> Any:
        key = name, start, dtype, shape
        room = self._rooms.get(key)
        if room is None:
            room = self._rooms[key] = LIBRARIES[name].room(self.memory[start : start + nbytes], dtype, tuple(shape))
        return room


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves arrays out, and notes where each has its bytes."""

    def __init__(self, file: io.BytesIO, refers: bool) -> None:
        super().__init__(file)
        self.nbytes = 0
        self.references: list[Any] = []
        self._refers = refers
        self.arrays: dict[str, list[tuple[Any, Any]]] = collections.defaultdict(list)

    def persistent_id(self, obj: Any) -> Any:
        name = library_of(type(obj))
        if not name:
            return None
        if self._refers and name == "jax":
            self.references.append(obj)
            return REFERENCE, len(self.references) - 1
        if not LIBRARIES[name].fits(obj) or 0 in obj.shape:
            return None
        nbytes = nbytes_of(obj)
        where = self.nbytes, obj.dtype, tuple(obj.shape), nbytes
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.arrays[name].append((where, obj))
        return name, *where


def put_back(live: Any, saved: Any) -> Any:
    """What a variable that holds `live` holds when it is restored to `saved`, which lies in a commit's memory.

    Arrays, dicts and lists stay the same objects where they can, with the saved contents: others may refer to them.
    """
    name = library_of(type(saved))
    if name:
        return LIBRARIES[name].put(live, saved)
    if isinstance(saved, _IMMUTABLE):
        return saved
    is_same = type(live) is type(saved)
    if type(saved) in (dict, collections.OrderedDict, collections.defaultdict):
        values = {key: put_back(live.get(key) if is_same else None, value) for key, value in saved.items()}
        kept = live if is_same else saved
        kept.clear()
        kept.update(values)
        return kept
    if isinstance(saved, list | tuple):
        lives = live if is_same and len(live) == len(saved) else [None] * len(saved)
        items = [put_back(one, other) for one, other in zip(lives, saved, strict=True)]
        if type(saved) is list and type(live) is list:
            live[:] = items
            return live
        return type(saved)(*items) if hasattr(saved, "_fields") else type(saved)(items)
    return copy.deepcopy(saved)
