"""Methods that Dynamo must not compile: DDP calls them where torch.compile is at work."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def uncompiled(method: Method) -> Method:
    """The method, which Dynamo calls and does not look into."""
    return _Uncompiled(method)  # type: ignore[return-value]


class _Uncompiled:
    """torch.compiler.disable would import Dynamo, which takes seconds: only a program that has it already needs it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    @functools.cached_property
    def _disabled(self) -> Callable[..., Any]:
        disable: Callable[[Any], Callable[..., Any]] = sys.modules["torch._dynamo"].disable
        return disable(self._method)

    def __get__(self, instance: object | None, owner: type) -> Any:
        method = self._disabled if "torch._dynamo" in sys.modules else self._method
        return method if instance is None else types.MethodType(method, instance)
