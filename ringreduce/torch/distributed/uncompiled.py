"""Methods that Dynamo must not compile: DDP calls them where torch.compile is at work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def uncompiled(method: Method) -> Method:
    """The method, which Dynamo calls and does not look into."""
    return _Uncompiled(method)  # type: ignore[return-value]


class _Uncompiled:
    """torch.compiler.disable would import Dynamo, which takes seconds: only a program that has it already needs it.

    Disabled methods take the places of these in the class when the first is asked for: __get__ is Python, too, and
    would be one more frame for Dynamo at every call.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __get__(self, instance: object | None, owner: type) -> Any:
        method = self._method
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)  # none yet while another thread imports it
        if disable is not None:
            for base in owner.__mro__:
                for name, each in list(vars(base).items()):
                    if isinstance(each, _Uncompiled):
                        setattr(base, name, disable(each._method))
            method = disable(method)
        return method if instance is None else method.__get__(instance, owner)
