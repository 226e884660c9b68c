"""Pickles of any Python object, lambdas and classes of the script too, whose functions keep the names of their files.

cloudpickle leaves those out since 3.1.3, and then neither a traceback nor a message of ours says where a line stands.
"""

from __future__ import annotations

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

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
