"""Pickles of any Python object, lambdas and classes of the script too, whose functions keep the names of their files.

cloudpickle leaves those out since 3.1.3, and then neither a traceback nor a message of ours says where a line stands.

It also makes a class of the script anew on each rank, which is not the rank's own: an enum's members would differ. And
where a process reads what it has written, it would give its own classes methods that see copies of the script's global
variables. So what a process has written is itself again there; and a class of a script that runs on all ranks is each
rank's own, unless it differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import operator
import pickle
import sys
import uuid
from collections import ChainMap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle

from ringreduce.errors import InputError, RingreduceError, described

_REDUCERS = cloudpickle.Pickler.dispatch_table
_SCRIPT = "__main__"
_PLAIN = (type(None), bool, int, float, str, bytes)

_keys: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # of the classes and functions that are this process's own
_own: WeakValueDictionary[str, Any] = WeakValueDictionary()  # these, by their keys


def _made(function: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return function(*arguments).replace(co_filename=file)


def _reduced(code: CodeType) -> tuple[Any, ...]:
    return _made, (*_REDUCERS[CodeType](code), code.co_filename)


def _key(own: Any) -> str:
    key = _keys.setdefault(own, uuid.uuid4().hex)
    _own[key] = own
    return key


def _contents(kind: type) -> str:
    """A digest of a class's code and plain attributes; what Python itself caches there, as it pickles, is neither."""
    found: dict[str, object] = {}
    for name, value in vars(kind).items():
        if (code := getattr(value, "__code__", None)) is not None:
            found[name] = code.co_code, code.co_names
        elif isinstance(value, _PLAIN):
            found[name] = value
        elif not name.startswith("__"):
            found[name] = type(value).__qualname__
    return hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=16).hexdigest()


def _in_script(name: str) -> Any:
    """The class of this name in this process's script; None if there is none."""
    try:
        found = operator.attrgetter(name)(sys.modules[_SCRIPT])
    except (AttributeError, KeyError):
        return None
    return found if isinstance(found, type) else None


def _found(key: str, name: str, contents: str, make: Callable[..., Any], *arguments: Any) -> Any:
    """This process's own class or function; where it has none a new one, which `_filled` fills."""
    own = _own.get(key)
    if own is None and name and (same := _in_script(name)) is not None and _contents(same) == contents:
        own = same
    if own is None:
        return make(*arguments)
    _key(own)
    return own


def _filled(found: Any, state: tuple[Callable[..., Any], Any]) -> None:
    fill, content = state
    if found not in _keys:
        fill(found, content)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickle.Pickler; pickle.loads reads what it writes, where ringreduce can be imported."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduced}, _REDUCERS)

    def reducer_override(self, obj: Any) -> Any:
        """What cloudpickle says; of a class or function that it takes apart with what finds this process's own."""
        reduced = super().reducer_override(obj)
        if not (isinstance(reduced, tuple) and len(reduced) == 6 and isinstance(obj, type | FunctionType)):
            return reduced
        make, arguments, state, *none, fill = reduced
        name = obj.__qualname__ if obj.__module__ == _SCRIPT and _in_script(obj.__qualname__) is obj else ""
        contents = _contents(_in_script(name)) if name else ""
        return _found, (_key(obj), name, contents, make, *arguments), (fill, state), *none, _filled


def dumps(obj: Any) -> bytes:
    """`obj`, pickled.

    Raises: what pickling it raises: TypeError, PicklingError, or an exception of its own class.
    """
    file = io.BytesIO()
    Pickler(file).dump(obj)
    return file.getvalue()


@contextlib.contextmanager
def unpickling(what: str, kind: type[RingreduceError] = InputError) -> Iterator[None]:
    """Inside, what a rank of this job has pickled is read.

    Raises: a `kind`, which says that `what` cannot be unpickled, and why.
    """
    try:
        yield
    except Exception as exc:
        raise kind(
            f"{what} cannot be unpickled here: {described(exc)}; the modules of its classes must be "
            "importable here, and an exception whose __init__ takes other arguments than its `args` needs a __reduce__"
        ) from exc


def loads(data: Any, what: str, kind: type[RingreduceError] = InputError) -> Any:
    """What a rank of this job has pickled; raises as `unpickling`."""
    with unpickling(what, kind):
        return pickle.loads(data)  # noqa: S301 - a rank's
