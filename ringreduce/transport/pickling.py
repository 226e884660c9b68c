"""Pickles of any Python object, lambdas and classes of the script too, whose functions keep the names of their files.

cloudpickle leaves those out since 3.1.3, and then neither a traceback nor a message of ours says where a line stands.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import ChainMap
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

from ringreduce.errors import InputError, RingreduceError, described

_REDUCERS = cloudpickle.Pickler.dispatch_table


def _made(function: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return function(*arguments).replace(co_filename=file)


def _reduced(code: CodeType) -> tuple[Any, ...]:
    return _made, (*_REDUCERS[CodeType](code), code.co_filename)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickle.Pickler; pickle.loads reads what it writes, where ringreduce can be imported."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduced}, _REDUCERS)


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
