"""One copy of a state: everything pickled but its arrays, whose bytes stand in one piece of memory."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import itertools
import pickle
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce.arrays.libraries import LIBRARIES, library_of
from ringreduce.elastic.kept import Found, KeptFile
from ringreduce.errors import InputError, described
from ringreduce.settings.log import JOB
from ringreduce.transport.pickling import Pickler, unpickling

ALIGNMENT = 64
PutBack = Callable[[Any, Any], Any]  # `Restoration.put_back`, of one restoration
IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, np.generic)


class ArrayInfo(NamedTuple):
    """Where an array has its bytes, and how to read them."""

    library: str  # empty: it is a reference, number `start`
    start: int
    dtype: Any
    shape: tuple[int, ...]
    nbytes: int
    kind: Any = None  # see `Library.kind`


class Commit:
    """A copy of a tree of objects and arrays, in memory that the next copy uses again.

    number: how many commits there have been; the same state on all ranks has the same number. 0: before the first sync.
    """

    def __init__(self) -> None:
        self.number = 0
        self.pickled = b""  # all but the arrays, for which it has their numbers in `infos`
        self.infos: list[ArrayInfo] = []
        self.memory = np.empty(0, np.uint8)
        self.references: list[Any] = []  # arrays that cannot change, and so are not copied
        self.file: KeptFile | None = None  # of which `memory` is a part
        self._rooms: list[Any] = []

    def take(self, tree: Any, number: int, refers: bool = False) -> None:
        """Copy `tree`.  Cost: copies its arrays once, and pickles what else there is.

        Raises: InputError, which names what cannot be pickled; then the commit is as before.
        refers: keep JAX's arrays without copying them; such a commit cannot be sent.
        """
        pickler = _Pickler(refers)
        try:
            pickler.dump(tree)
        except Exception as exc:
            raise _unpicklable(tree, exc) from exc
        self.begin(pickler.infos)
        for name, numbers in pickler.of_library.items():
            LIBRARIES[name].keep([self._rooms[each] for each in numbers], [pickler.arrays[each] for each in numbers])
        self.finish(number, pickler.file.getvalue(), pickler.references)

    def begin(self, infos: list[ArrayInfo]) -> None:
        """Have memory for such arrays; until `finish` this is no commit."""
        nbytes = max((each.start + each.nbytes for each in infos if each.library), default=0)
        memory = self._memory(nbytes)
        if infos != self.infos or memory is not self.memory:
            self.memory, self.infos = memory, infos
            self._rooms = [self._room(each) for each in infos]

    def _memory(self, nbytes: int) -> Any:
        """As many bytes: the file's if there is one with room, those that there are, or new ones."""
        if self.file is not None:
            with self._keeping(self.file):
                self.file.begin(nbytes)
                return self.file.memory
        is_own = self.memory.base is None  # and not a file's
        return self.memory if is_own and self.memory.nbytes == nbytes else np.empty(nbytes, np.uint8)

    def finish(self, number: int, pickled: bytes, references: Sequence[Any] = ()) -> None:
        """Its memory is filled."""
        self.number, self.pickled, self.references = number, pickled, list(references)
        if self.file is not None:
            with self._keeping(self.file):
                self.file.finish(number, (self.infos, pickled))

    @contextlib.contextmanager
    def _keeping(self, file: KeptFile) -> Iterator[None]:
        """Do something with the file; where that is not possible go on without one."""
        try:
            yield
        except OSError as error:
            file.fail()
            self.file = None
            why = f"{error.strerror}, {file.path} on host {socket.gethostname()}"
            JOB.warning(f"elastic: no more commits are kept for a restart: {why}; a restart would go back further")

    def read(self, found: Found) -> None:
        """Be a commit that was kept."""
        infos, pickled = found.rest
        self.file, self.memory, self.infos = None, found.memory, infos
        self._rooms = [self._room(each) for each in infos]
        self.finish(found.number, pickled)

    def _room(self, info: ArrayInfo) -> Any:
        if not info.library:
            return None
        memory = self.memory[info.start : info.start + info.nbytes]
        return LIBRARIES[info.library].room(memory, info.dtype, info.shape, info.kind)

    def tree(self) -> Any:
        """The tree; its arrays may lie in this commit's memory: see `Restoration`.

        Raises: InputError where it cannot be unpickled.
        """
        with unpickling(f"commit {self.number} of the state"):
            return _Unpickler(self.pickled, functools.cache(self._array)).load()

    def _array(self, number: int) -> Any:
        info = self.infos[number]
        return LIBRARIES[info.library].array(self._rooms[number]) if info.library else self.references[info.start]


class _Unpickler(pickle.Unpickler):
    """Of what a rank of this job has pickled."""

    def __init__(self, pickled: bytes, array: Callable[[int], Any]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._array = array

    def persistent_load(self, number: int) -> Any:
        """An array that was left out."""
        return self._array(number)


def _unpicklable(tree: Any, error: Exception) -> InputError:
    """The error for a tree, which names the first entry that fails alone."""
    which = "the state"
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        try:
            _Pickler(refers=False).dump(value)
        except Exception as exc:
            which, error = f"attribute {name!r} of the state", exc
            break
    why = f"{which} cannot be pickled: {described(error)}"
    return InputError(f"commit: {why}; leave it out, or give its class a __reduce__")


class _Pickler(Pickler):
    """Leaves arrays out, and decides where each has its bytes."""

    def __init__(self, refers: bool) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.infos: list[ArrayInfo] = []
        self.arrays: list[Any] = []
        self.of_library: dict[str, list[int]] = collections.defaultdict(list)  # numbers of arrays
        self.references: list[Any] = []
        self._numbers: dict[int, int] = {}  # by identity: an array that stands in several places is kept once
        self._nbytes = 0
        self._refers = refers

    def persistent_id(self, obj: Any) -> int | None:
        name = library_of(type(obj))
        if not name:
            return None
        if id(obj) in self._numbers:
            return self._numbers[id(obj)]
        if self._refers and name == "jax":
            info = ArrayInfo("", len(self.references), None, (), 0)
            self.references.append(obj)
        elif LIBRARIES[name].fits(obj) and obj.nbytes:
            info = ArrayInfo(name, self._nbytes, obj.dtype, tuple(obj.shape), obj.nbytes, LIBRARIES[name].kind(obj))
            self._nbytes += -(-obj.nbytes // ALIGNMENT) * ALIGNMENT
            self.of_library[name].append(len(self.infos))
        else:
            return None
        self.infos.append(info)
        self.arrays.append(obj)
        self._numbers[id(obj)] = len(self.infos) - 1
        return len(self.infos) - 1


class Restoration:
    """Puts back what a commit has; an object that stands in several places of it is again one, in all of them."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, Any]] = {}  # by identity of the saved one: it, and what is restored
        self._restored: set[int] = set()

    def put_back(self, live: Any, saved: Any) -> Any:
        """What a variable that holds `live` holds when it is restored to `saved`, which lies in a commit's memory.

        Arrays, dicts, lists, and in these what has a state_dict(), stay the same objects where they can, with the saved
        contents: others may refer to them.
        """
        if isinstance(saved, IMMUTABLE):
            return saved
        if id(saved) not in self._done:
            is_free = id(live) not in self._restored  # else it has become another one's since the commit
            self._done[id(saved)] = saved, self._put(live if is_free else None, saved)
        return self._done[id(saved)][1]

    def _put(self, live: Any, saved: Any) -> Any:
        if library_of(type(saved)):
            return self._kept(LIBRARIES[library_of(type(saved))].put(live, saved), saved)
        is_same = type(live) is type(saved)
        if type(saved) in (dict, collections.OrderedDict, collections.defaultdict):
            kept = self._kept(live if is_same else saved, saved)
            values = {key: self.put_back(live.get(key) if is_same else None, value) for key, value in saved.items()}
            kept.clear()
            kept.update(values)
            return kept
        is_named = isinstance(saved, tuple) and hasattr(saved, "_fields")
        if type(saved) in (list, tuple) or is_named:  # another subclass may have more than its items
            kept = self._kept(live if is_same else saved, saved) if type(saved) is list else None
            lives = list(live)[: len(saved)] if is_same else []
            items = [self.put_back(one, other) for one, other in itertools.zip_longest(lives, saved)]
            if kept is not None:
                kept[:] = items
                return kept
            return type(saved)._make(items) if is_named else type(saved)(items)
        if has_state_dict(saved) and isinstance(live, type(saved)):
            live.load_state_dict(self.put_back(live_state(live), saved.state_dict()))
            return self._kept(live, saved)
        return _copied(saved)

    def _kept(self, restored: Any, saved: Any) -> Any:
        """Return what is restored to `saved`, and is noted before its entries are: one may be itself."""
        self._restored.add(id(restored))
        self._done[id(saved)] = saved, restored
        return restored


def has_state_dict(value: Any) -> bool:
    """True for what is saved and restored by its state_dict() and load_state_dict()."""
    return hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict")


def live_state(value: Any) -> Any:
    """What an object's state is restored into: of an optimizer without a state_dict, whose arrays others hold, too."""
    return None if getattr(value, "has_state_dict", True) else value.state_dict()


def _copied(saved: Any) -> Any:
    """A copy of an object in a commit, with arrays of its own, on their devices."""
    pickler = _Pickler(refers=False)
    pickler.dump(saved)
    copies = functools.cache(lambda number: Restoration().put_back(None, pickler.arrays[number]))
    return _Unpickler(pickler.file.getvalue(), copies).load()
